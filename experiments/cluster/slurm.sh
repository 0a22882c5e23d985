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
port=6379
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')

# Nodes reach each other over the cluster's network, so a token keeps everybody else out.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
start="ray start --block --disable-usage-stats --num-cpus=$SLURM_CPUS_PER_TASK --num-gpus=$SLURM_GPUS_ON_NODE"
srun --nodes=1 --ntasks=1 -w "$head" \
  $start --head --node-ip-address="$address" --port="$port" --include-dashboard=false &
sleep 20
if ((SLURM_JOB_NUM_NODES > 1)); then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
    $start --address="$address:$port" &
  sleep 20
fi

srun --overlap --nodes=1 --ntasks=1 -w "$head" \
  oxrl train "$config" --resume run.ray_address="$address:$port" "$@" &
run=$!
trap 'kill -TERM "$run"; wait "$run"' TERM
wait "$run"
