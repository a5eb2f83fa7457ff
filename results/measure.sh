#!/usr/bin/env bash
# Measure the scripts; append the raw lines of every run to a file, which draw.py can draw.
#
#   bash results/measure.sh FILE table       run_all.sh with 512 images per GPU: its table, and the lines of its logs
#   bash results/measure.sh FILE scaling     1, 2, 4, ... GPUs: 512 images per GPU, and 512 over all GPUs
#   bash results/measure.sh FILE batches     64, 128, 256 and 512 images per GPU on all GPUs, with and without --compile
#   bash results/measure.sh FILE ceilings    one GPU, 512 images: three scripts, after what the GPU can do at most (ceiling.py)
#   bash results/measure.sh FILE peers       Lightning, accelerate and transforms per image, beside ddp_launch_train.py
#   bash results/measure.sh FILE dp          nn.DataParallel itself, dp_train.py and ddp_launch_train.py, 512 images per GPU
#   bash results/measure.sh FILE timm        224 pixels, float16: apex_amp_train.py beside timm's train.py, named in TIMM
#   bash results/measure.sh FILE accuracy    all defaults, three seeds; also with mirrored test images (then again with --compile)
#   bash results/measure.sh FILE airbench    the accuracy of cifar10-airbench's programs, in the folder AIRBENCH
#   bash results/measure.sh FILE start       seconds from the command to each line of its output
#
# More flags go on to the scripts. Of each run, FILE has its command after a $, the line of each epoch, and the RESULT
# (of timm and airbench, what they print).
# PYTHON names the Python to use (default: python3), EPOCHS the epochs of a run whose speed is measured (default: 5),
# COUNTS="1 4" the numbers of GPUs (default: all powers of two), IMAGES="64 128" the images per GPU of `batches`.
# To compare speeds, give a command three times, and take medians.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if (($# < 2)); then
  sed -n '2,/^set/s/^# \{0,1\}//p' results/measure.sh >&2
  exit 2
fi
file=$1 part=$2
shift 2
python=${PYTHON:-python3} epochs=${EPOCHS:-5} flags=("$@")
found=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 1
IFS=, read -ra names <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((found - 1)))}"

# one GPUS SCRIPT FLAG...: run a script on the first GPUs and keep its lines.
one() {
  local gpus=$1 script=$2 start=("$python")
  shift 2
  if [[ $script != dp_train.py && $script != ddp_spawn_train.py && $script != *@(lightning|dataparallel)_train.py ]]; then
    start=("$python" -m torch.distributed.run --standalone "--nproc-per-node=$((gpus ? gpus : 2))")
  fi
  set -- "$script" "$@" "${flags[@]}"
  printf '$ gpus=%s %s\n' "$gpus" "$*" | tee -a "$file" >&2
  OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=$(IFS=, && printf '%s' "${names[*]:0:gpus}") \
    "${start[@]}" "$@" 2>>"$file.err" |
    grep --line-buffered -E '^(epoch [0-9]+ (train_loss|images_per_second)|RESULT) ?' | tee -a "$file" |
    grep --line-buffered -o 'images_per_second [0-9]*' >&2
}

counts=()
for ((n = 1; n <= found; n *= 2)); do
  counts+=("$n")
done
((found)) || counts=(0) # the CPU
[[ ${COUNTS-} ]] && read -ra counts <<<"$COUNTS"
all=${counts[-1]}
printf '# %s, %s, commit %s, measure.sh %s %s\n' "$("$python" -c 'import sys, torch
name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU"
print(f"{name}, PyTorch {torch.__version__}, Python {sys.version.split()[0]}")')" "$(date +%Y-%m-%d)" \
  "${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || printf unknown)}" "$part" "$*" >>"$file"
case $part in
  table)
    ((all)) && flags=(--batch-size $((512 * all)) --epochs "$epochs" "${flags[@]}")
    stamp=$(mktemp)
    CUDA_VISIBLE_DEVICES=$(IFS=, && printf '%s' "${names[*]:0:all}") PYTHON=$python bash run_all.sh "${flags[@]}" \
      2>>"$file.err" | tee -a "$file"
    logs=$(find logs -mindepth 1 -maxdepth 1 -newer "$stamp" | tail -n 1)
    [[ $logs ]] || exit 1
    for log in "$logs"/*.log; do
      printf '## %s\n' "${log##*/}"
      grep -E '^(epoch [0-9]+ train_loss|RESULT) ' "$log"
    done >>"$file"
    ;;
  scaling)
    for n in "${counts[@]}"; do
      batches=($((512 * (n ? n : 1))))
      ((n > 1)) && batches+=(512)
      for batch in "${batches[@]}"; do
        for compile in '' --compile; do
          one "$n" ddp_launch_train.py --batch-size "$batch" --epochs "$epochs" $compile
          one "$n" apex_amp_train.py --opt-level O1 --batch-size "$batch" --epochs "$epochs" $compile
        done
        one "$n" dp_train.py --batch-size "$batch" --epochs "$epochs"
      done
    done
    ;;
  batches)
    for images in ${IMAGES:-64 128 256 512}; do
      for compile in '' --compile; do
        one "$all" ddp_launch_train.py --batch-size $((images * (all ? all : 2))) --epochs "$epochs" $compile
      done
    done
    ;;
  ceilings)
    for precision in bf16 fp16; do
      for mode in '' --graph --compile '--compile --graph'; do
        printf '$ gpus=1 ceiling.py --precision %s %s\n' "$precision" "$mode" >>"$file"
        # shellcheck disable=SC2086
        CUDA_VISIBLE_DEVICES=${names[0]} "$python" results/ceiling.py --precision "$precision" $mode 2>>"$file.err" >>"$file"
      done
    done
    for compile in '' --compile; do
      one 1 ddp_launch_train.py --batch-size 512 --epochs "$epochs" $compile
      one 1 apex_amp_train.py --batch-size 512 --epochs "$epochs" $compile
    done
    one 1 dp_train.py --batch-size 512 --epochs "$epochs"
    ;;
  peers)
    batch=$((512 * (all ? all : 1)))
    one "$all" ddp_launch_train.py --batch-size "$batch" --epochs "$epochs"
    one "$all" ddp_launch_train.py --batch-size "$batch" --epochs "$epochs" --compile
    for peer in lightning accelerate torchvision; do
      one "$all" results/peers/${peer}_train.py --batch-size "$batch" --epochs "$epochs"
    done
    ;;
  dp)
    for script in results/dataparallel_train.py dp_train.py ddp_launch_train.py; do
      one "$all" "$script" --batch-size $((512 * (all ? all : 1))) --epochs "$epochs"
    done
    ;;
  timm)
    : "${TIMM:?}"
    batch=$((256 * (all ? all : 1)))
    one "$all" apex_amp_train.py --image-size 224 --batch-size "$batch" --epochs "$epochs"
    printf '$ %s\n' "$TIMM, 256 images per GPU" >>"$file"
    "$python" -m torch.distributed.run --standalone "--nproc-per-node=$((all ? all : 2))" "$TIMM" --data-dir data \
      --dataset torch/cifar10 --num-classes 10 --model resnet50 --input-size 3 224 224 -b 256 --amp --channels-last \
      --output "$(mktemp -d)" --workers 12 --epochs "$epochs" --opt sgd --lr 0.1 --warmup-epochs 0 --log-interval 24 2>&1 |
      tee -a "$file.err" | grep -oE 'Train: .*' >>"$file"
    ;;
  accuracy)
    for seed in 21 22 23; do
      checkpoint=$(mktemp -d)/run.pt
      one "$all" ddp_launch_train.py --seed "$seed" --checkpoint "$checkpoint"
      "$python" results/mirror.py "$checkpoint" >>"$file"
    done
    ;;
  airbench)
    : "${AIRBENCH:?}"
    python=$(command -v "$python" | xargs realpath -s)
    for program in airbench94_muon.py airbench96_faster.py; do
      printf '$ %s\n' "$program" >>"$file"
      (cd "$AIRBENCH" && "$python" "$program") 2>>"$file.err" | grep -E '  eval  |^Mean' >>"$file"
    done
    ;;
  start)
    printf '$ ddp_launch_train.py --epochs 1 --log-every 1 %s\n' "$*" >>"$file"
    "$python" -m torch.distributed.run --standalone "--nproc-per-node=$((all ? all : 2))" ddp_launch_train.py \
      --epochs 1 --log-every 1 "${flags[@]}" 2>&1 | "$python" -u -c 'import sys, time
start = time.time()
for line in sys.stdin:
    print(f"{time.time() - start:.2f} s", line, end="", flush=True)' >>"$file"
    ;;
  *)
    printf '%s is no part\n' "$part" >&2
    exit 2
    ;;
esac
