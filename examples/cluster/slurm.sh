#!/bin/bash
# A Ray cluster for one SLURM job, and a run on it. The first node has Ray's head and the launching process.
#   sbatch examples/cluster/slurm.sh examples/cluster/recipe.yaml [section.key=value ...]
#SBATCH --job-name=paceline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --signal=B:TERM@300
set -euo pipefail
export RAY_worker_niceness=0 # else replicas and ranks wait for everything else on their node

PORT=6379
GPUS=${SLURM_GPUS_PER_NODE:-8}
CPUS=${SLURM_CPUS_PER_TASK:-64}
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${NODES[0]}

# --block keeps Ray in the foreground, so that it ends with its step.
srun --nodes=1 --ntasks=1 --nodelist="$HEAD" --overlap \
  ray start --head --port="$PORT" --num-cpus="$CPUS" --num-gpus="$GPUS" --block &
for NODE in "${NODES[@]:1}"; do
  srun --nodes=1 --ntasks=1 --nodelist="$NODE" --overlap \
    ray start --address="$HEAD:$PORT" --num-cpus="$CPUS" --num-gpus="$GPUS" --block &
done

# The launching process waits until the cluster has as many nodes as the job.
srun --nodes=1 --ntasks=1 --nodelist="$HEAD" --overlap \
  bash -c "until [ \"\$(ray list nodes --address $HEAD:$PORT --filter state=ALIVE --format json 2>/dev/null \
    | grep -c node_id)\" -ge ${#NODES[@]} ]; do sleep 2; done"

# On the signal five minutes before the end the run saves and exits with 75; start it again with --resume.
srun --nodes=1 --ntasks=1 --nodelist="$HEAD" --overlap paceline launch "$@" --address "$HEAD:$PORT" &
RUN=$!
trap 'kill -TERM $RUN' TERM
CODE=0
wait $RUN || CODE=$?
exit "$CODE"
