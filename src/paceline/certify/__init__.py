"""`paceline certify`: statistical tests of whether a backend samples what the policy says."""
