#!/usr/bin/env bash
# Two nodes of 8 GPUs under SLURM: sbatch configs/slurm.sh paper-sdar-8b-b64 /shared/runs/rcd-8b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@300
# The signal comes 5 minutes before the limit: rcd saves and exits, and the next job goes on with --resume.
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280  # torchrun would kill its workers 30 s after the signal, before they have saved
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "$head:29500" \
  -m rcd train "$1" --output "$2" --resume
