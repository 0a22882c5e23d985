#!/usr/bin/env bash
# One RL run over the nodes of a Slurm allocation: sbatch experiments/cluster/slurm.sh CONFIG [section.field=value ...]
# The checkout, its .venv, the model and the run directory must lie on a file system that every node sees.
#SBATCH --job-name=oxrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# Slurm warns oxRL two minutes before the end: it saves and stops, and the next job goes on from there.
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG [section.field=value ...]}
shift
source .venv/bin/activate
port=${RAY_PORT:-6379}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')

# Nodes reach each other over the cluster's network, so a token keeps everybody else out.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(head -c 24 /dev/urandom | base64)
export RAY_AUTH_TOKEN
# Ray gives way to everything else on a node (15); here the actors are what the nodes are for.
export RAY_worker_niceness=0
start="ray start --block --disable-usage-stats --num-cpus=$SLURM_CPUS_PER_TASK --num-gpus=$SLURM_GPUS_ON_NODE"
srun --nodes=1 --ntasks=1 -w "$head" \
  $start --head --node-ip-address="$address" --port="$port" --include-dashboard=false &
# `ray health-check` answers once the head does, `ray status` lists a node a line.
for _ in $(seq 60); do
  ray health-check --address="$address:$port" && break
  sleep 2
done 2>/dev/null
if ((SLURM_JOB_NUM_NODES > 1)); then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
    $start --address="$address:$port" &
fi
for _ in $(seq 60); do
  ((SLURM_JOB_NUM_NODES <= $(ray status --address="$address:$port" | grep -c ' node_'))) && break
  sleep 2
done

srun --overlap --nodes=1 --ntasks=1 -w "$head" \
  oxrl train "$config" --resume run.ray_address="$address:$port" "$@" &
run=$!
stopped=
trap 'stopped=yes; kill -TERM "$run"' TERM
code=0
wait "$run" || code=$?
if [[ $stopped ]]; then # a signal ends a `wait`; the run saves first
  code=0
  wait "$run" || code=$?
fi
# The raylets are this script's.
kill $(jobs -p) 2>/dev/null || true
exit "$code"
