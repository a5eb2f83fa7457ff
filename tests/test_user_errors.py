"""What a user can get wrong: one sentence on the screen, no traceback, no RESULT, and no file changed."""

import re
import sys

import pytest
import torch
from conftest import ROOT, SMALL, command, edited, result, run
from torchvision.models import ResNet18_Weights, resnet18

ONE = [*SMALL, "--epochs", "1", "--device", "cpu"]
# How the script is started | flags | what the sentence contains. The fixture `folder` makes the files.
TABLE = """
dp | --epochs many | argument --epochs: invalid int value: 'many'
launch | --color red | unrecognized arguments: --color red
dp | --lr nan | --lr must be at least 0
dp, launch, spawn, apex | --device cuda | argument --device: invalid choice: 'cuda' (choose from
python launch, python apex, RANK=0 python launch, RANK=0 python apex | | start this script with torchrun: torchrun
torchrun dp, torchrun spawn | | start this script without torchrun: python
launch, spawn, apex | --batch-size 13 | --batch-size must be at most 61, and divisible by 2 processes
dp, launch, spawn | --batch-size 62 | --batch-size must be at most 61,
dp, launch, spawn | --data-dir none | ; put cifar-10-python.tar.gz in none, or use --synthetic
apex | --data-dir archive | ; put cifar-10-python.tar.gz in archive, or use --synthetic
dp | --data-dir tampered | ; put cifar-10-python.tar.gz in tampered, or use --synthetic
TORCH_HOME=none dp, TORCH_HOME=. spawn | --pretrained --image-size 65 | ; put https:
launch | --pretrained --image-size 64 | --pretrained needs --image-size 65 or more
dp | --checkpoint missing/run.pt | missing for --checkpoint
dp | --checkpoint archive | archive (IsADirectoryError)
launch, spawn | --checkpoint cut | cut (RuntimeError)
dp, apex | --checkpoint code | code (UnpicklingError)
dp | --checkpoint run.pt.best | run.pt.best (KeyError)
dp, launch | --checkpoint run.pt | run.pt has arch=vgg11, not resnet18; use its flags
apex | --checkpoint run.pt | run.pt (KeyError)
apex | --backend apex | --backend apex needs a GPU, NVIDIA Apex 25.04 (see README), and no --compile
apex | --opt-level O2 --backend torch | PyTorch has no O2 (float16 weights with float32 copies); use O1, or
"""
CASES = [tuple(part.strip() for part in line.split("|")) for line in TABLE.strip().splitlines()]
CASES = [(start, *rest) for starts, *rest in CASES for start in starts.split(", ")]
for least, names in (0, "lr clip-grad workers seed"), (1, "limit image-size epochs batch-size log-every timeout"):
    CASES += [("launch", f"--{name} {least - 1}", f"--{name} must be at least {least}") for name in names.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder of files that are not what they should be."""
    top = tmp_path_factory.mktemp("files")
    code = b"cos\nmkdir\n(S'owned'\ntR."  # a pickle: whoever loads it calls os.mkdir("owned")
    batches = ["batches.meta", "test_batch", *(f"data_batch_{number}" for number in range(1, 6))]
    files = {f"tampered/cifar-10-batches-py/{name}": code for name in batches} | {"code": code}
    weights = "hub/checkpoints/" + ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    files |= dict.fromkeys(["archive/cifar-10-python.tar.gz", weights], b"no such thing")
    for name, content in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(content)
    saved = dict(flags=dict(arch="vgg11"), epoch=1, metrics={}, net=torch.zeros(1000), optimizer={}, scheduler={})
    torch.save(saved, top / "run.pt")
    (top / "cut").write_bytes((top / "run.pt").read_bytes()[:3000])
    torch.save(resnet18().state_dict(), top / "run.pt.best")
    return top


@pytest.mark.parametrize(("start", "flags", "sentence"), CASES)
def test_one_sentence(start, flags, sentence, folder):
    *words, script = start.split()
    script = dict(dp="dp_train", apex="apex_amp_train").get(script, f"ddp_{script}_train")
    flags = [*(["--device", "cpu"] if "--data-dir" in flags else ONE), *flags.split()]
    arguments = command(script, *flags)
    if words and "=" not in words[-1]:  # started in the wrong way
        starts = dict(python=[sys.executable], torchrun=command("ddp_launch_train")[:-1])
        arguments = [*starts[words[-1]], str(ROOT / f"{script}.py"), *flags]
    env = dict(CUDA_VISIBLE_DEVICES="", TORCH_DIST_INIT_BARRIER="1")  # else Gloo complains if the other ends first
    env |= dict(word.split("=") for word in words if "=" in word)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}
    finished = run(arguments, cwd=folder, timeout=60, **env)
    other = "^usage: |^ |signal SIGTERM|^process . terminated with exit code|^Downloading: "
    said = {line for line in finished.stderr.splitlines() if not re.search(other, line)}
    assert finished.returncode != 0 and "Traceback" not in finished.stderr
    assert len(said) == 1 and sentence in said.pop(), finished.stderr
    assert "RESULT" not in finished.stdout and "epoch 1" not in finished.stdout
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert before == after and not (folder / "owned").exists()


def test_torchrun_shows_the_sentence_of_the_process():
    finished = run(command("ddp_launch_train", *ONE, "--batch-size", "13"), real=True, TORCH_DIST_INIT_BARRIER="1")
    assert finished.returncode == 1 and "RESULT" not in finished.stdout
    assert "--batch-size must be at most 61, and divisible by 2 processes\n" in finished.stderr
    assert 'ddp_launch_train.py", line' not in finished.stderr  # no traceback but torchrun's own


def test_processes_that_find_different_checkpoints_say_so(tmp_path):
    # As on two machines without a shared disk: one process has the checkpoint, the other has none.
    line = '    world_size = int(os.environ["WORLD_SIZE"])'
    change = (line, "    args.checkpoint = f'{rank}.pt'\n" + line)
    folder = edited(tmp_path / "project", "ddp_launch_train", change)
    result(run(command("ddp_launch_train", *ONE, folder=folder, nproc=1), cwd=tmp_path))  # writes 0.pt
    finished = run(command("ddp_launch_train", *ONE, folder=folder), cwd=tmp_path)
    assert finished.returncode == 1 and "Traceback" not in finished.stderr and "RESULT" not in finished.stdout
    assert ".pt; use a shared disk\n" in finished.stderr


def test_a_negative_number_in_cuda_visible_devices_means_the_cpu():
    assert result(run(command("dp_train", *ONE[:-2]), CUDA_VISIBLE_DEVICES="-1"))["device"] == "cpu"
