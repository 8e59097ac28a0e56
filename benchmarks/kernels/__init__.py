"""This project's kernels beside torch's, and beside the device's peak rates.

    case.py        what is measured (a kernel, its torch equivalent, bytes and operations), and what comes out
    workload.py    how many rows, which contexts: one list for a GPU, a small one for a CPU
    limits.py      the device's bandwidth and rate of multiplication, measured
    products.py, attention.py, experts.py, sampler.py, history.py    the cases, one file for each family
    run.py         compares each case with torch's result, then times it
    __main__.py    the command line: python -m benchmarks.kernels

On a CPU the engine runs the kernels' torch references, and so does this.
"""
