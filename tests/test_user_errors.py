"""What a user can get wrong: one sentence on stderr that names the next step, exit code 2, no traceback."""

import os
import re
import sys

import pytest
import torch
import torchvision
from conftest import ROOT, SMALL, command, run

ONE = [*SMALL, "--epochs", "1", "--device", "cpu"]
LISTS = "; --help lists the flags"
HUGE = "9" * 30


def numbers():
    """Yield a case for every number flag with each kind of wrong value."""
    zero_is_fine = ("lr", "clip-grad", "workers", "seed")
    for name in "limit image-size epochs batch-size lr clip-grad workers seed log-every timeout nproc".split():  # noqa: SIM905
        script = {"timeout": "ddp_launch_train", "nproc": "ddp_spawn_train"}.get(name, "dp_train")
        for value in ["-1", HUGE, *([] if name in zero_is_fine else ["0"])]:
            yield f"{name} {value[:2]}", (script, [f"--{name}", value], f"--{name} is ")
        yield f"{name} many", (script, [f"--{name}", "many"], f"'many'{LISTS}")
        yield f"{name} missing", (script, [f"--{name}"], f"expected one argument{LISTS}")


def words():
    """Yield a case for every flag that takes one of some words."""
    for name in "arch precision device opt-level backend ddp".split():  # noqa: SIM905
        script = "apex_amp_train" if name in ("opt-level", "backend", "ddp") else "dp_train"
        yield f"{name} wrong", (script, [f"--{name}", "wrong"], "invalid choice: 'wrong'")
        yield f"{name} missing", (script, [f"--{name}"], f"expected one argument{LISTS}")


ALONE = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
CASES = dict(numbers()) | dict(words())
CASES |= {
    "half a flag": ("dp_train", ["--epoch", "3"], f"unrecognized arguments: --epoch 3{LISTS}"),
    "no flag": ("ddp_launch_train", ["3"], f"unrecognized arguments: 3{LISTS}"),
    "lr nan": ("dp_train", ["--lr", "nan"], "--lr is nan and must be from 0"),
    "lr inf": ("dp_train", ["--lr", "inf"], "--lr is inf and must be from 0"),
    "weights and stem": ("ddp_launch_train", ["--pretrained"], "need --image-size 65 or more"),
    "SyncBN on the CPU": ("ddp_spawn_train", ["--sync-bn"], "--sync-bn needs GPUs; leave it out"),
    "O2": ("apex_amp_train", ["--opt-level", "O2", "--backend", "torch"], "use --opt-level O1"),
    "batch over 2": ("ddp_spawn_train", ["--batch-size", "13"], "12 and 14 are nearest"),
    "batch under 2": ("ddp_launch_train", ["--batch-size", "1"], "2 and 4 are nearest"),
    "more than the data": ("dp_train", ["--batch-size", "62"], "more than the 61 training images; give less"),
    "no weights": ("dp_train", ["--pretrained", "--image-size", "224"], "or drop --pretrained"),
    "cut weights": ("dp_train", ["--pretrained", "--image-size", "80"], "drop --pretrained", {"TORCH_HOME": "{tmp}"}),
    "TensorBoard": ("ddp_launch_train", ["--tensorboard", "{tmp}/file"], "or name another folder"),
    "profile of five steps": ("dp_train", ["--profile", "{tmp}/trace"], "needs 8 steps or more to come; give more"),
    "profile": ("ddp_launch_train", ["--profile", "{tmp}/no/trace.json", "--epochs", "2"], "name a file that can be"),
    "profile over weights": ("dp_train", ["--profile", "{tmp}/cut.pt", "--epochs", "2"], "does not end in .json or"),
    "checkpoint without a name": ("ddp_launch_train", ["--checkpoint", ""], "--checkpoint is empty; name a file"),
    "checkpoint of no bytes": ("dp_train", ["--checkpoint", "{tmp}/empty.pt"], "empty.pt (EOFError); give"),
    "checkpoint pipe": ("ddp_launch_train", ["--checkpoint", "{tmp}/pipe"], "(it is no file); give its"),
    "torchrun dp": ("dp_train", [], "start it with: python", dict(WORLD_SIZE="2", RANK="0")),
    "torchrun spawn": ("ddp_spawn_train", [], "start it with: python", dict(WORLD_SIZE="2", RANK="0")),
    "other arch": ("dp_train", ["--checkpoint", "{tmp}/other.pt"], "(it has --arch resnet50"),
    "more epochs are done": ("dp_train", ["--checkpoint", "{tmp}/longer.pt"], "(it has 9 epochs, 9 steps in all);"),
    "other data": ("ddp_spawn_train", ["--checkpoint", "{tmp}/larger.pt"], "(it has 1 epochs, 999 steps in all);"),
    "other batch size": ("ddp_launch_train", ["--checkpoint", "{tmp}/batch.pt"], "(it has --batch-size 24); give its"),
    "no checkpoint": ("ddp_launch_train", ["--checkpoint", "{tmp}/file"], "or another FILE"),
    "cut checkpoint": ("dp_train", ["--checkpoint", "{tmp}/cut.pt"], "or another FILE"),
    "empty checkpoint": ("dp_train", ["--checkpoint", "{tmp}/empty.pt"], "or another FILE"),
    "folder as checkpoint": ("dp_train", ["--checkpoint", "{tmp}"], "or another FILE"),
    "code in the checkpoint": ("dp_train", ["--checkpoint", "{tmp}/code.pt"], "or another FILE"),
    "device cuda": ("dp_train", ["--device", "cuda"], "finds no GPU; see nvidia-smi, or use --device cpu"),
    "no such GPU": ("dp_train", ["AUTO"], "finds 0 GPUs; see nvidia-smi -L, or use", {"CUDA_VISIBLE_DEVICES": "99"}),
    "a GPU twice": ("dp_train", ["AUTO"], "finds 0 GPUs; see nvidia-smi -L", {"CUDA_VISIBLE_DEVICES": "98,98"}),
    "a negative GPU": ("ddp_launch_train", ["AUTO"], "finds 0 GPUs; see nvidia-smi", {"CUDA_VISIBLE_DEVICES": "-1"}),
    "half an environment": ("alone", [], "lacks LOCAL_RANK, LOCAL_WORLD_SIZE,", {"RANK": "0", "WORLD_SIZE": "2"}),
    "no rank": ("alone", [], "; start with torchrun, which sets them all", {"WORLD_SIZE": "2"}),
    "no such network card": ("ddp_spawn_train", [], "check the addresses and", dict(GLOO_SOCKET_IFNAME="eth99")),
    "no such port": ("alone", [], "cannot meet (", ALONE | dict(MASTER_PORT="port")),
    "no data": ("dp_train", ["DATA", "{tmp}/none"], "or use --synthetic"),
    "file as data": ("dp_train", ["DATA", "{tmp}/file"], "or use --synthetic"),
    "folder that cannot be made": ("dp_train", ["DATA", "/proc/none"], "name the folder that has it with --data-dir"),
    "cut archive": ("dp_train", ["DATA", "{tmp}/archive"], "or use --synthetic"),
    "tampered batch": ("ddp_launch_train", ["DATA", "{tmp}/tampered"], "or use --synthetic"),
}


class Code:
    """What a pickle with code in it does to those who load it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Make a folder of broken files."""
    top = tmp_path_factory.mktemp("broken")
    (top / "file").write_text("no checkpoint, no folder")
    os.mkfifo(top / "pipe")  # neither read nor replaced
    kind = dict(arch="resnet18", image_size=8, batch_size=12, lr=0.02)
    torch.save(kind | dict(arch="resnet50"), top / "other.pt")
    torch.save(kind | dict(batch_size=24), top / "batch.pt")
    torch.save(kind | dict(epoch=9, scheduler=dict(last_epoch=9)), top / "longer.pt")
    torch.save(kind | dict(epoch=1, scheduler=dict(last_epoch=999)), top / "larger.pt")
    torch.save(kind | dict(model=Code(str(top / "owned"))), top / "code.pt")
    torch.save(kind | dict(model=torch.zeros(10_000)), top / "cut.pt")
    (top / "cut.pt").write_bytes((top / "cut.pt").read_bytes()[:20_000])
    (top / "empty.pt").touch()
    weights = top / "hub" / "checkpoints" / torchvision.models.ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    weights.parent.mkdir(parents=True)
    weights.write_bytes((top / "cut.pt").read_bytes())
    (top / "empty.pt").touch()
    (top / "archive").mkdir()
    (top / "archive" / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b")
    (top / "tampered" / "cifar-10-batches-py").mkdir(parents=True)
    for name in ("batches.meta", "test_batch", *(f"data_batch_{n}" for n in range(1, 6))):
        torch.save(Code(str(top / "owned")), top / "tampered" / "cifar-10-batches-py" / name)
    return top


@pytest.mark.parametrize("case", CASES)
def test_one_sentence(case, broken, tmp_path):
    script, flags, sentence, env = (*CASES[case], {})[:4]
    if flags[:1] == ["DATA"]:
        flags = ["--device", "cpu", "--data-dir", *flags[1:]]
    elif flags == ["AUTO"]:
        flags = [*SMALL, "--epochs", "1"]
    else:
        flags = [*ONE, *flags]
    flags = [flag.replace("{tmp}", str(broken)) for flag in flags]
    env = {key: value.replace("{tmp}", str(broken)) for key, value in env.items()}
    env = dict(TORCH_HOME=str(tmp_path / "home"), CUDA_VISIBLE_DEVICES="") | env
    before = {path: path.read_bytes() for path in broken.rglob("*") if path.is_file() and ".lock" not in path.name}
    if script == "alone":
        script, arguments = "ddp_launch_train", [sys.executable, str(ROOT / "ddp_launch_train.py"), *flags]
    elif script == "ddp_spawn_train" and "nproc" in case:
        arguments = [sys.executable, str(ROOT / f"{script}.py"), *flags]
    else:
        arguments = command(script, *flags)
    finished = run(arguments, cwd=tmp_path, timeout=60, **env)
    # spawn() says whom it ends, and torch.hub of PyTorch 2.6 what it is about to download.
    lines = [line for line in finished.stderr.splitlines() if not re.search("SIGTERM|^Downloading: ", line)]
    assert finished.returncode == 2, finished.stdout + finished.stderr
    assert len(lines) == 1 and lines[0].startswith(f"{script}.py: ") and sentence in lines[0], finished.stderr
    assert "Traceback" not in finished.stderr and "RESULT" not in finished.stdout
    assert all(path.read_bytes() == text for path, text in before.items())
    assert not (broken / "owned").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}


def test_there_are_at_least_sixty_of_them():
    assert len(CASES) >= 60


@pytest.mark.parametrize("flags", [["--batch-size", "13"], ["--device", "cuda"]], ids=" ".join)
def test_under_torchrun_one_process_says_it(flags):
    finished = run(command("ddp_launch_train", *SMALL, *ONE, *flags), real=True, CUDA_VISIBLE_DEVICES="")
    assert finished.returncode == 1  # torchrun's own
    said = [line for line in finished.stderr.splitlines() if line.startswith("ddp_launch_train.py: ")]
    assert len(said) == 1, finished.stderr
    assert "[rank0]: Traceback" not in finished.stderr
