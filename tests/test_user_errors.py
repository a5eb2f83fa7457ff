"""What a user can get wrong: one sentence on stderr that names the next step, an exit code, no traceback."""

import importlib
import re

import pytest
import torch
from conftest import SMALL, command, run

ONE = ["--epochs", "1", "--device", "cpu"]
FLAGS = {
    "unknown flag": ("dp_train", [*SMALL, "--epoch", "3"], "--help lists the flags"),
    "no number": ("ddp_spawn_train", [*SMALL, "--epochs", "many"], "--help lists the flags"),
    "negative": ("dp_train", [*SMALL, "--batch-size", "-4"], "--batch-size is -4 and must be from 1 to"),
    "zero epochs": ("apex_amp_train", [*SMALL, "--epochs", "0"], "--epochs is 0 and must be from 1"),
    "NaN": ("dp_train", [*SMALL, "--lr", "nan"], "--lr is nan and must be from 0"),
    "unknown arch": ("dp_train", [*SMALL, "--arch", "vgg16"], "--help lists the flags"),
    "weights and stem": ("ddp_launch_train", [*SMALL, *ONE, "--pretrained"], "--image-size 65 or more"),
    "SyncBN on the CPU": ("ddp_spawn_train", [*SMALL, *ONE, "--sync-bn"], "--sync-bn needs GPUs"),
    "O2": ("apex_amp_train", [*SMALL, *ONE, "--opt-level", "O2"], "use --opt-level O1"),
    "Apex": ("apex_amp_train", [*SMALL, *ONE, "--backend", "apex"], "use --backend torch"),
}
CASES = {
    "no data": ("dp_train", ["--device", "cpu", "--data-dir", "{tmp}/empty"], "or use --synthetic"),
    "data folder is a file": ("dp_train", ["--device", "cpu", "--data-dir", "{tmp}/file"], "or use --synthetic"),
    "typo": ("dp_train", [*SMALL, "--epoch", "3"], "--help lists the flags"),
    "no GPU": ("dp_train", [*SMALL, "--device", "cuda"], "use --device cpu"),
    "batch over 2": ("ddp_spawn_train", [*SMALL, *ONE, "--batch-size", "13"], "12 and 14 are nearest"),
    "batch under 2": ("ddp_spawn_train", [*SMALL, *ONE, "--batch-size", "1"], "2 and 4 are nearest"),
    "more than the data": ("dp_train", [*SMALL, *ONE, "--batch-size", "62"], "more than the 61 training images"),
    "weights": ("dp_train", [*SMALL, *ONE, "--pretrained", "--image-size", "224"], "or drop --pretrained"),
    "other arch": ("dp_train", [*SMALL, *ONE, "--checkpoint", "{tmp}/other.pt"], "it has --arch resnet50"),
    "no checkpoint": ("ddp_spawn_train", [*SMALL, *ONE, "--checkpoint", "{tmp}/file"], "or another FILE"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_one_sentence_for_a_flag(case, monkeypatch, capsys):
    script, flags, sentence = FLAGS[case]
    monkeypatch.setattr("sys.argv", [f"{script}.py", *flags])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(script).parse_args()
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{script}.py: ") and sentence in err and err.count("\n") == 1


@pytest.mark.parametrize("case", CASES)
def test_one_sentence(case, tmp_path):
    script, flags, sentence = CASES[case]
    (tmp_path / "file").write_text("no checkpoint, no folder")
    torch.save(dict(arch="resnet50", image_size=32), tmp_path / "other.pt")
    flags = [flag.replace("{tmp}", str(tmp_path)) for flag in flags]
    finished = run(command(script, *flags), cwd=tmp_path, TORCH_HOME=str(tmp_path / "hub"), CUDA_VISIBLE_DEVICES="")
    # spawn() says whom it ends, and torch.hub of PyTorch 2.6 what it is about to download.
    lines = [line for line in finished.stderr.splitlines() if not re.search("SIGTERM|^Downloading: ", line)]
    assert finished.returncode == 2, finished.stderr
    assert len(lines) == 1 and lines[0].startswith(f"{script}.py: ") and sentence in lines[0], finished.stderr
    assert "Traceback" not in finished.stderr and "RESULT" not in finished.stdout
    assert (tmp_path / "file").read_text() == "no checkpoint, no folder"


@pytest.mark.parametrize("flags", [["--batch-size", "13"], ["--epochs", "many"], ["--device", "cuda"]], ids=" ".join)
def test_under_torchrun_one_process_says_it(flags, tmp_path):
    finished = run(command("ddp_launch_train", *SMALL, *ONE, *flags), real=True, CUDA_VISIBLE_DEVICES="")
    assert finished.returncode == 1  # torchrun's own
    said = [line for line in finished.stderr.splitlines() if line.startswith("ddp_launch_train.py: ")]
    assert len(said) == 1, finished.stderr
    assert "[rank0]: Traceback" not in finished.stderr
