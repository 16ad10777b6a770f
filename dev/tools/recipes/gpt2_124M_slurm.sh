#!/usr/bin/env bash
# gpt2.sh 124M on two nodes of eight GPUs, under Slurm. Submit it in the top folder, which both
# nodes must see:
#
#     sbatch dev/tools/recipes/gpt2_124M_slurm.sh
#
# batch    16 ranks with B=32 and T=1024 make up the 524,288 tokens of a step (-d)
# ranks    srun starts 16; they find each other through a file in log_gpt2_124M/
# restart  120 seconds before the time limit Slurm sends SIGTERM. The ranks write a checkpoint and
#          exit with status 143, and the job is queued again, as it is when a node fails. It then
#          resumes from its last checkpoint (-y 1).
#SBATCH --job-name=gpt2_124M
#SBATCH --output=gpt2_124M_%j.txt
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "error: this is not a Slurm job; expected sbatch $0" >&2
    exit 1
fi
cd "$SLURM_SUBMIT_DIR"
export LAUNCH="srun --cpus-per-task=$SLURM_CPUS_PER_TASK --kill-on-bad-exit=0 python"
status=0
dev/tools/recipes/gpt2.sh 124M -b 32 -m 320 -z 1 "$@" || status=$?
if [ "$status" = 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
