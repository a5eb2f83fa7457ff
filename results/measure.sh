#!/usr/bin/env bash
# Measure how the recipes scale; keep the raw lines of every run in a file for draw.py.
#
#   bash results/measure.sh FILE weak         512 images per GPU on 1, 2, 4, ... GPUs, every recipe
#   bash results/measure.sh FILE strong       512 images over all GPUs
#   bash results/measure.sh FILE accuracy     all defaults, three seeds
#
# More flags go on to every recipe (--compile, say). Each run stands in FILE as its command after a $, the line of each
# epoch, and the RESULT. PYTHON names the Python to use (default: python3), RECIPES="dp_train.py ..." and COUNTS="1 4" the
# recipes and the numbers of GPUs (default: all).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if (($# < 2)); then
  sed -n '2,/^set/s/^# \{0,1\}//p' results/measure.sh >&2
  exit 2
fi
file=$1 part=$2
shift 2
python=${PYTHON:-python3}
found=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 1
IFS=, read -ra names <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((found - 1)))}"

# one GPUS SCRIPT FLAG...: run a recipe on the first GPUs and keep its lines.
one() {
  local gpus=$1 script=$2 start=("$python")
  shift 2
  if [[ $script == ddp_launch_train.py || $script == apex_amp_train.py ]]; then
    start=("$python" -m torch.distributed.run --standalone "--nproc-per-node=$((gpus ? gpus : 2))")
  fi
  printf '$ gpus=%s %s\n' "$gpus" "$script $*" | tee -a "$file" >&2
  CUDA_VISIBLE_DEVICES=$(IFS=, && printf '%s' "${names[*]:0:gpus}") "${start[@]}" "$script" "$@" 2>>"$file.err" |
    grep -E '^(epoch [0-9]+ train_loss|RESULT) ?' | tee -a "$file" | sed -n 's/^RESULT .*\("images_per_second": [^,]*\).*/\1/p' >&2
}

counts=()
for ((n = 1; n <= found; n *= 2)); do
  counts+=("$n")
done
((found)) || counts=(0) # the CPU
[[ ${COUNTS-} ]] && read -ra counts <<<"$COUNTS"
read -ra recipes <<<"${RECIPES:-dp_train.py ddp_launch_train.py ddp_spawn_train.py apex_amp_train.py}"
printf '# %s, %s, commit %s, %s part %s\n' "$("$python" -c 'import sys, torch
name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU"
print(f"{name}, PyTorch {torch.__version__}, Python {sys.version.split()[0]}")')" "$(date +%Y-%m-%d)" \
  "$(git rev-parse --short HEAD 2>/dev/null || printf unknown)" "$*" "$part" >>"$file"
for n in "${counts[@]}"; do
  batch=$((512 * (n ? n : 1)))
  case $part in
    weak | strong)
      epochs=3
      [[ $part == weak ]] && epochs=$((n + 2)) # at least 100 steps
      [[ $part == strong ]] && batch=512
      for script in "${recipes[@]}"; do
        one "$n" "$script" --batch-size "$batch" --epochs "$epochs" "$@"
      done
      ;;
    accuracy)
      ((n == ${counts[-1]})) || continue
      for seed in 21 22 23; do
        one "$n" ddp_launch_train.py --seed "$seed" "$@"
      done
      ;;
    *)
      printf '%s is no part: weak, strong, accuracy\n' "$part" >&2
      exit 2
      ;;
  esac
done
