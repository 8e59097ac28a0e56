"""`paceline bench kernels`: this project's kernels beside torch's, and beside what the device can do at best.

    case.py        what is measured (a kernel, its torch equivalent, bytes and operations), and what comes out
    workload.py    how many rows, which contexts: one list for a GPU, a small one for a CPU
    timing.py      seconds of a call: CUDA graphs on a GPU, the host's clock on a CPU
    limits.py      the device's bandwidth and rate of multiplication, measured
    products.py, attention.py, experts.py, sampler.py, history.py    the cases, one file for each family
    run.py         compares each case with torch's result, then times it

On a CPU the engine runs the kernels' torch references, and so does this.
"""
