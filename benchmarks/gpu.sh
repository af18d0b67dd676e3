#!/bin/sh
# On a machine with a GPU, within ten minutes: the tests, the speed, and 20 training steps.
#
#     sh benchmarks/gpu.sh [MODEL FOLDER]        with what requirements.txt names installed, from the repository's root
#
# Each part has a limit of its own, and the next one runs whatever became of it. Logs and results go to runs/gpu.
# On a GPU the tests that compare two runs bit for bit may fail (see the README); the others must not.
set -u
model=${1:-assets/model} out=runs/gpu
mkdir -p "$out"

part() { # part NAME SECONDS COMMAND...
    name=$1 limit=$2
    shift 2
    echo "== $name: $*"
    timeout "$limit" "$@" > "$out/$name.log" 2> "$out/$name.err"
    code=$?
    tail -n 40 "$out/$name.log"
    [ $code = 0 ] || tail -n 20 "$out/$name.err"
    echo "== $name: exit code $code"
}

part device 30 python -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
part tests 180 python -m pytest
part bench 120 python benchmarks/bench.py --device cuda --model "$model" --out "$out/bench.json"
part bench-bf16 120 python benchmarks/bench.py --device cuda --model "$model" --dtype bfloat16 --out "$out/bench-bf16.json"
part train 140 python train.py --device cuda --steps 20 --eval-limit 50 --out "$out/train"
