#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
# One task is one worker. Two minutes before the time is up, all tasks save and exit with 75.
srun .venv/bin/python -m recipes.bert_mlm --run-dir /shared/runs/first
status=$?
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
