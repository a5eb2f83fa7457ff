#!/usr/bin/env bash
# Train with every recipe on the chosen GPUs, one after the other, and compare them in one table.
#
#   bash run_all.sh [flags of the recipes]                 every GPU
#   CUDA_VISIBLE_DEVICES=0,1 bash run_all.sh --epochs 5    two GPUs, five epochs
#   bash run_all.sh test [flags of pytest]                 install what the tests need, and run them
#
# Each run keeps its logs and its table (Markdown) in a folder of its own under logs/. The exit code is 1 when a
# recipe failed. PYTHON names the Python to use (default: python3). Paths count from the folder of this script.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # as after: sh run_all.sh
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" || exit 1

say() { printf '%s\n' "$@" >&2; }

# find_python REQUIREMENTS MODULE...: print the Python in use if it has all modules, else .venv's, made when needed.
find_python() {
  local requirements=$1 python check
  shift
  check="import $(IFS=, && printf '%s' "$*")"
  for python in "${PYTHON:-python3}" .venv/bin/python; do
    "$python" -c "$check" 2>/dev/null && command -v "$python" && return
  done
  say "${PYTHON:-python3} lacks one of: $*. Making .venv from $requirements (some GB and minutes, once)."
  if ! (
    flock 9 # of two that start at once, one makes it
    .venv/bin/python -c "$check" 2>/dev/null && exit
    "${PYTHON:-python3}" -m venv .venv && .venv/bin/python -m pip install --quiet -r "$requirements" >&2
  ) 9>.venv.lock; then
    say "That failed, as said above. Mend it, or install $requirements and name that Python: PYTHON=... bash run_all.sh"
    return 1
  fi
  printf '%s\n' .venv/bin/python
}

# run NAME COMMAND...: run one recipe, show it, keep its log.
run() {
  local name=$1
  shift
  say '' "== $name: $*"
  : >"$logs/$name.log"
  setsid "$@" >>"$logs/$name.log" 2>&1 & # out of reach of a SIGHUP, by which torchrun would end in spite of nohup
  running=$!
  tail -n +1 -s 0.2 -f --pid="$running" "$logs/$name.log" | grep --line-buffered -v '^RESULT ' >&2 &
  wait "$running" # in the background, so that a signal is heard at once
  local code=$?
  running=
  wait
  rows+=("$name=$code")
  if ((code)); then
    say "== $name failed with exit code $code (log: $logs/$name.log); going on"
  fi
}

# stop EXIT_CODE: end the recipe that runs, and this script.
# shellcheck disable=SC2329 # the traps call it
stop() {
  if [[ $running ]] && kill -TERM "$running" 2>/dev/null; then
    wait
  fi
  say "Stopped. The logs so far are in $logs"
  exit "$1"
}

# Print the table of the rows NAME=CODE from the RESULT lines in the logs; the first row is the baseline.
table() {
  "$python" - "$logs" "${rows[@]}" <<'PY'
import json, pathlib, sys

logs = pathlib.Path(sys.argv[1])
head = ["recipe", "processes", "process ids", "s / 20 steps", "images/s", "speed-up", "peak MiB per GPU", "test accuracy"]
lines, baseline = [head, ["---"] + ["---:"] * 7], None
for name, code in (row.split("=") for row in sys.argv[2:]):
    results = [line for line in (logs / f"{name}.log").read_text().splitlines() if line.startswith("RESULT ")]
    if code != "0" or not results:
        lines.append([name, f"failed, exit code {code}: see {logs / name}.log"] + [""] * 6)
        continue
    result = json.loads(results[-1][len("RESULT "):])
    speed, seconds = result["images_per_second"] or 0, result["seconds_per_20_steps"] or 0
    baseline = baseline or (name == sys.argv[2].split("=")[0] and speed) or None
    lines.append([
        name, str(result["world_size"]), " ".join(map(str, result["pids"])), f"{seconds:.3f}", f"{speed:,.0f}",
        f"{speed / baseline:.2f}" if baseline else "", " ".join(map(str, result["peak_memory_mib"])),
        f"{100 * result['val_accuracy']:.2f}%",
    ])
widths = [max(len(line[i]) for line in lines if len(line[1]) < 30 or i == 0) for i in range(8)]
for line in lines:
    print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")
PY
}

main() {
  if [[ ${1-} == -h || ${1-} == --help ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' run_all.sh
    exit 0
  fi
  if [[ ${1-} == test ]]; then
    shift
    python=$(find_python tests/requirements.txt torch torchvision tqdm tensorboard pytest xdist ruff) || exit 1
    "$python" -m ruff check . || exit 1
    PATH="$(dirname "$python"):$PATH" shellcheck run_all.sh .ci/run results/measure.sh || exit 1
    exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
  fi

  python=$(find_python requirements.txt torch torchvision tqdm) || exit 1
  local launch=(env OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone)
  local settings gpus apex synthetic data_dir level ddp amp=(apex_amp_train.py --backend)
  local flags=() notes=() rows=() running="" baseline=one_gpu first=${CUDA_VISIBLE_DEVICES-0}
  # The recipes' own parser reads the flags, so that a typo ends here and not seven times.
  settings=$("$python" -c 'if True:
    import sys, torch, dp_train
    sys.argv[0] = "run_all.sh"
    args = dp_train.parse_args()
    if args.checkpoint or args.tensorboard or args.profile or args.precision:
        flags = "--checkpoint, --tensorboard, --profile and --precision"
        dp_train.common.fail(f"{flags} are not for all recipes; give them to one script")
    import apex_amp_train
    apex = apex_amp_train.why_not_apex(args.device) is None
    print(torch.cuda.device_count() if args.device == "cuda" else 0, apex, args.synthetic, args.data_dir)' "$@") || exit 2
  read -r gpus apex synthetic data_dir < <(tail -n 1 <<<"$settings")
  logs=logs/$(date +%Y%m%d-%H%M%S)-$$
  mkdir -p "$logs" || exit 1
  trap 'stop 129' HUP
  trap 'stop 130' INT
  trap 'stop 143' TERM
  if ((gpus)); then
    launch+=(--nproc-per-node=gpu)
    flags=(--batch-size $((512 / gpus * gpus))) # it has to divide by the processes
  else
    baseline=one_process
    launch+=(--nproc-per-node=2)
    flags=(--device cpu --arch resnet18 --image-size 8 --limit 160 --batch-size 32 --epochs 2 --lr 0.02 --workers 1)
    flags+=(--log-every 2)
    notes+=("No GPU: two processes on the CPU and a few images. This shows that all runs, not how fast it is.")
  fi
  flags+=("$@")
  if [[ $synthetic == False ]]; then
    "$python" -c 'import sys, common; common.load_cifar10(sys.argv[1])' "$data_dir" 2>"$logs/data.log" &
    running=$! # in the background, so that a signal is heard at once
    if ! wait "$running"; then
      notes+=("Synthetic images, since there is $(tail -n 1 "$logs/data.log" | sed 's/^-c: //')")
      flags+=(--synthetic)
    fi
  fi
  ((${#notes[@]})) && say "${notes[@]}"

  CUDA_VISIBLE_DEVICES=${first%%,*} run "$baseline" "$python" dp_train.py "${flags[@]}"
  run dp "$python" dp_train.py "${flags[@]}"
  run ddp_launch "${launch[@]}" ddp_launch_train.py "${flags[@]}"
  run ddp_spawn "$python" ddp_spawn_train.py "${flags[@]}"
  if [[ $apex == True ]]; then
    for ddp in apex torch; do
      for level in O0 O1 O2 O3; do
        run "apex_${level}_${ddp}_ddp" "${launch[@]}" "${amp[@]}" apex --ddp "$ddp" --opt-level "$level" "${flags[@]}"
      done
    done
  fi
  for level in O0 O1 O3; do # O2 is Apex's alone
    run "torch_${level}_torch_ddp" "${launch[@]}" "${amp[@]}" torch --opt-level "$level" "${flags[@]}"
  done

  {
    printf '%s\n' "\`bash run_all.sh $*\`, $(date +%Y-%m-%d), $("$python" -c 'import torch, sys
name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if int(sys.argv[1]) else "CPU"
print(f"{name}, PyTorch {torch.__version__}, Python {sys.version.split()[0]}")' "$gpus")" ''
    if ((${#notes[@]})); then
      printf '%s\n' "${notes[@]}" ''
    fi
    table
  } | tee "$logs/table.md"
  say '' "Logs and table.md are in $logs"
  [[ " ${rows[*]} " =~ =[1-9] ]] && exit 1
  exit 0
}

main "$@"
