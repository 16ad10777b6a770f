#!/usr/bin/env bash
# GPT-2 124M with the flags of gpt2_124M.sh, on two nodes of eight GPUs, which Slurm finds:
#
#     sbatch dev/recipes/gpt2_124M_slurm.sh
#
# batch    16 ranks with B=32 and T=1024 have the 524,288 tokens of -d at once. With B=64 they would have twice as many
# ranks    srun starts 16. They meet by a file in log_gpt2_124M/ that only this user can read. The top folder, in which
#          sbatch is called, has to be one that both nodes see
# time     python -m dev.tools.scaling predicts a step
# its end  120 seconds before the time limit Slurm sends SIGTERM to the ranks. They write a checkpoint and leave with
#          status 143, and the job goes back into the queue. There it also goes if a node fails. Started again, -y 1
#          goes on from the last checkpoint
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
    echo "error: this is no job of Slurm's; expected sbatch $0" >&2
    exit 1
fi
cd "$SLURM_SUBMIT_DIR"
export LAUNCH="srun --cpus-per-task=$SLURM_CPUS_PER_TASK --kill-on-bad-exit=0 python"
status=0
dev/recipes/gpt2_124M.sh -b 32 -m 320 -z 1 "$@" || status=$?
if [ "$status" = 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
