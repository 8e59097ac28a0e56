#!/bin/bash
# The learner on a GPU: attention kernels, gradients against references, then updates by shape.
# Each part has its own time limit and leaves the others alone.
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD/src:$PWD PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
python3 -c "
import importlib, torch
names = ('triton', 'transformers', 'liger_kernel', 'flash_attn', 'torchao', 'bitsandbytes', 'pytest')
found = {n: getattr(importlib.import_module(n), '__version__', '?') for n in names if importlib.util.find_spec(n)}
print(torch.__version__, torch.cuda.get_device_name(), 'cudnn', torch.backends.cudnn.version(), found)
"
timeout 45 python3 benchmarks/learner_attention.py 2>&1 | tail -12 | cut -c1-400
timeout 160 python3 benchmarks/learner_gpu.py ${@:-checks 4b 4b-fp8 1.7b 1.7b-exact} 2>&1 | grep -v Warning | cut -c1-600 | tail -80
timeout 75 python3 benchmarks/peer_learner.py --shape qwen3-4b 2>&1 | tail -8 | cut -c1-600
