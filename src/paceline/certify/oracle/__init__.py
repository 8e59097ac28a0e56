"""What a backend should have sampled, in float64 and from the definitions.

Nothing here imports anything of Paceline (a test holds it to that): a bug in the sampler, in truncation, in
the noise or in the seeds cannot also be in what it is compared with.
"""
