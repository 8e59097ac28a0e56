export PYTHONPATH=src:bench PYTHONUNBUFFERED=1
t=tests/kernels/test_attention.py; s=$(date +%s)
i=0
for k in "bits and 32-8-128" "bits and 9-3-64" "bits and 28-4-128" "bits and 16-16-64" "bits and 4-2-32" "test_paged_kernel and cuda-False-1-" "test_paged_kernel and cuda-False-5-" "test_paged_kernel and cuda-False-17-" "test_paged_kernel and cuda-True-1-" "test_paged_kernel and cuda-True-5-" "test_paged_kernel and cuda-True-17-" "test_prefill or cutting or long_context"; do
  i=$((i+1)); (timeout 60 python3 -m pytest -q -m gpu -p no:cacheprovider $t -k "$k" > /tmp/p$i.log 2>&1) &
done
(timeout 60 python3 bench/probe_compare.py warm 100 > /tmp/warm.log 2>&1) &
wait
for j in $(seq 1 $i); do tail -n 1 /tmp/p$j.log; grep -m3 "^E  \|^FAILED" /tmp/p$j.log; done
grep -m3 Error /tmp/warm.log; echo tests $(( $(date +%s) - s )) s
timeout $1 python3 bench/probe_compare.py go $2 2>&1 | tail -40
echo all $(( $(date +%s) - s )) s
