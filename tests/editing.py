"""How the tests edit copies of the scripts and of minimal/."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["dp_train", "ddp_launch_train", "ddp_spawn_train", "apex_amp_train"]

# Edits for copy_script. A model in float64 without BatchNorm, and no augmentation: then the number of processes
# changes rounding only.
RESNET = "common.build_resnet(args.arch, args.image_size, args.pretrained)"
FLOAT64 = [
    (RESNET, "nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 10)).double()"),
    ("args.pretrained, augment=training)", "args.pretrained).double()"),
    ("outputs.float()", "outputs"),
]
# Where the model does not matter, for a ResNet takes a second to be made. In float16, a step of it takes seconds.
SMALL_MODEL = (
    RESNET,
    "nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))",
)

# Rank 0 is killed when it has written the checkpoint of epoch 2, but not yet given it its name.
KILLED_IN_EPOCH_2 = ("    os.replace(", "    if state.get('epoch') == 2: os.kill(os.getpid(), 9)\n    os.replace(")

# Apex needs a GPU. On the CPU, the folder stand_in has a stand-in for it.
APEX_ON_THE_CPU = ("(amp is None or args.compile or not torch.cuda.is_available())", "amp is None")

# For minimal/ on the CPU: generated images, and a small model with BatchNorm.
IMAGES = """
def small_images(n):
    generator = torch.Generator().manual_seed(n)
    labels = torch.randint(10, (n,), generator=generator)
    colours = 2 * nn.functional.one_hot(labels, 48).view(n, 3, 4, 4)
    return torch.utils.data.TensorDataset(torch.rand(n, 3, 4, 4, generator=generator) + colours, labels)
"""
SMALL_MINIMAL = {
    'torch.device("cuda")': 'torch.device("cpu")',
    'torch.device("cuda", local_rank)': 'torch.device("cpu")',
    "torch.cuda.set_device(device)": "pass",
    '"nccl", device_id=device': '"gloo"',
    "models.resnet50(num_classes=10)": "nn.Sequential(nn.Flatten(), nn.Linear(48, 10), nn.BatchNorm1d(10))",
    "model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)": "pass",
    "model.maxpool = nn.Identity()": "pass",
    "lr=1e-3": "lr=1e-2",
    "num_workers=8": "num_workers=0",
    "batch_size=512": "batch_size=40",
    "batch_size = 512": "batch_size = 40",
}


def edited(text, *edits):
    """Return a text after some edits, each (old text, new text). The old text must be there once."""
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} times: {old}"
        text = text.replace(old, new)
    return text


def copy_script(folder, script, *edits):
    """Copy a script and common.py, nothing else, into a folder, and edit the script."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "common.py", folder)
    (folder / f"{script}.py").write_text(edited((ROOT / f"{script}.py").read_text(), *edits))
    return folder
