#!/bin/bash
#SBATCH --nodes=4
#SBATCH --no-kill
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
# A Ray cluster for the time of this job. A node that fails does not end it (--no-kill).
export RAY_DISABLE_USAGE_STATS=1
port=6379
names=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since Slurm 22.05 srun does not take it from sbatch
# Not `--ip-address`, which is 127.0.0.1 on many systems.
head=$(srun --nodes=1 --ntasks=1 --nodelist="${names[0]}" hostname -I | tr ' ' '\n' | grep -m1 -E '^[0-9.]+$')
if [ -z "$head" ]; then echo "${names[0]} has no IPv4 address" >&2; exit 2; fi
start() { # name of the node, options of ray start
  srun --no-kill --overlap --nodes=1 --ntasks=1 --nodelist="$1" \
    .venv/bin/ray start --num-cpus="$SLURM_CPUS_PER_TASK" --block "${@:2}" &
}
start "${names[0]}" --head --node-ip-address="$head" --port="$port" --include-dashboard=false
for _ in $(seq 60); do (: < "/dev/tcp/$head/$port") 2> /dev/null && break; sleep 1; done
for name in "${names[@]:1}"; do start "$name" --address="$head:$port"; done
.venv/bin/python -m launch.on_ray --address "$head:$port" --workers "1:$SLURM_NNODES" \
  --cpus-per-worker "$SLURM_CPUS_PER_TASK" -m recipes.bert_mlm --run-dir /shared/runs/first &
driver=$!
trap 'kill -TERM "$driver"' TERM
wait "$driver"
status=$?
if [ "$status" -gt 128 ]; then wait "$driver"; status=$?; fi # the trap ends the first one
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
