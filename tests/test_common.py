"""common.py: the data, the transform, the network, printing and seeding."""

import builtins
import contextlib
import hashlib
import http.server
import io
import json
import pickle
import subprocess
import sys
import tarfile
import threading
import time

import numpy as np
import pytest
import torch
import torchvision
from conftest import ROOT

import common

# Loads CIFAR-10 as the recipes do, but from the address, and with the md5 sums, that the test gives.
LOAD = """
import json, sys
import common
from torchvision.datasets import CIFAR10
given = json.load(open(sys.argv[1]))
CIFAR10.url, CIFAR10.tgz_md5 = given["url"], given["tgz_md5"]
CIFAR10.train_list = [[name, given["md5"][name]] for name, _ in CIFAR10.train_list]
CIFAR10.test_list = [[name, given["md5"][name]] for name, _ in CIFAR10.test_list]
CIFAR10.meta = dict(CIFAR10.meta, md5=given["md5"]["batches.meta"])
train, test = common.load_cifar10(sys.argv[2], limit=30)
assert train.tensors[1].tolist() == [i % 10 for i in range(20)] + list(range(10))
print("LOADED", len(train), len(test), int(train.tensors[0].sum()))
"""


def archive():
    """Return a CIFAR-10 archive of 20 images a file, and the md5 of each of its files."""
    generator = np.random.default_rng(0)
    names = [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]
    contents = {}
    for name in names:
        images = generator.integers(0, 256, (20, 3072), dtype=np.uint8)
        contents[name] = pickle.dumps({"data": images, "labels": [i % 10 for i in range(20)]})
    contents["batches.meta"] = pickle.dumps({"label_names": list("abcdefghij")})
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue(), {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}


@pytest.fixture
def server(tmp_path):
    """Serve an archive on loopback, slowly enough for processes to overlap, and count who fetches it."""
    content, sums = archive()
    gets = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            gets.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(served[0])))
            self.end_headers()
            half = len(served[0]) // 2
            with contextlib.suppress(ConnectionError):
                self.wfile.write(served[0][:half])
                self.wfile.flush()
                time.sleep(2)
                self.wfile.write(served[0][half:])

        def log_message(self, *args):
            pass

    served = [content]
    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    given = dict(url=f"http://127.0.0.1:{http_server.server_port}/cifar-10-python.tar.gz", md5=sums)
    given["tgz_md5"] = hashlib.md5(content).hexdigest()
    yield given, served, gets
    http_server.shutdown()


def load(given, folder, tmp_path, count):
    (tmp_path / "given.json").write_text(json.dumps(given))
    arguments = [sys.executable, "-c", LOAD, str(tmp_path / "given.json"), str(folder)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    processes = [subprocess.Popen(arguments, **pipes) for _ in range(count)]
    return [(process, *process.communicate(timeout=120)) for process in processes]


def test_four_processes_at_once_download_once(server, tmp_path):
    given, _, gets = server
    ended = load(given, tmp_path / "new" / "data", tmp_path, 4)
    assert [process.returncode for process, _, _ in ended] == [0] * 4, ended
    outputs = {out for _, out, _ in ended}
    assert len(outputs) == 1 and outputs.pop().startswith("LOADED 30 20 ")
    assert len(gets) == 2  # torchvision asks twice for one download: for where it is, and for it


def test_a_corrupted_archive_is_refused(server, tmp_path):
    given, served, _ = server
    served[0] = served[0][:-100] + bytes(100)
    [(process, out, err)] = load(given, tmp_path / "data", tmp_path, 1)
    assert process.returncode == 2 and "LOADED" not in out
    assert "could not be downloaded" in err and "--synthetic" in err and "Traceback" not in err
    assert not (tmp_path / "data" / "cifar-10-batches-py").exists()


def test_a_damaged_file_is_mended_from_the_archive(server, tmp_path):
    given, _, gets = server
    load(given, tmp_path / "data", tmp_path, 1)
    batch = tmp_path / "data" / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes()[:-1])
    [(process, out, err)] = load(given, tmp_path / "data", tmp_path, 1)
    assert process.returncode == 0 and out.startswith("LOADED"), err
    assert len(gets) == 2  # as before: the archive is still there, and whole


def test_synthetic_images_are_the_same_for_the_same_seed_and_can_be_told_apart():
    (train, test), (again, _), (other, _) = (common.synthetic_cifar10(seed, 200) for seed in (1, 1, 2))
    images, labels = train.tensors
    assert images.shape == (200, 32, 32, 3) and images.dtype == torch.uint8 and labels.dtype == torch.int64
    assert torch.equal(images, again.tensors[0]) and not torch.equal(images, other.tensors[0])
    means = torch.stack([images[labels == k].float().mean(0) for k in range(10)])
    distances = (test.tensors[0].float()[:, None] - means).flatten(2).norm(dim=2)
    assert (distances.argmin(1) == test.tensors[1]).float().mean() > 0.9


def test_without_training_the_transform_only_normalises():
    images = torch.randint(256, (5, 32, 32, 3), dtype=torch.uint8)
    out = common.BatchTransform(32)(images, train=False)
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    expected = ((images / 255 - mean) / std).permute(0, 3, 1, 2)
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_in_training_each_image_has_its_own_crop_and_flip():
    # The same picture 500 times, its pixels numbered: every copy must be one of the 81 crops, or its mirror image.
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    picture = torch.stack([rows, columns, torch.zeros_like(rows)], 2).to(torch.uint8)
    transform = common.BatchTransform(32)
    torch.manual_seed(0)
    out = transform(picture.expand(500, 32, 32, 3), train=True)
    out = (out.permute(0, 2, 3, 1) * transform.std.flatten() + transform.mean.flatten()).round().long()
    seen = set()
    padded = np.pad(np.arange(32), 4, mode="reflect")
    for image in out:
        down, right = image[:, 0, 0].numpy(), image[0, :, 1].numpy()
        assert (image[:, :, 0] == image[:, :1, 0]).all() and (image[:, :, 1] == image[:1, :, 1]).all()
        dy = [d for d in range(9) if (padded[d : d + 32] == down).all()]
        dx = [(d, f) for d in range(9) for f in (1, -1) if (padded[d : d + 32][::f] == right).all()]
        assert len(dy) == len(dx) == 1
        seen.add((dy[0], *dx[0]))
    assert len(seen) > 140  # of 162


@pytest.mark.parametrize("size", [16, 64, 224])
def test_images_are_resized(size):
    images = torch.randint(256, (2, 32, 32, 3), dtype=torch.uint8)
    assert common.BatchTransform(size, pretrained=True)(images, train=True).shape == (2, 3, size, size)


@pytest.mark.parametrize(("size", "stem"), [(32, (3, 3)), (64, (3, 3)), (65, (7, 7))])
def test_the_stem_follows_the_image_size(size, stem):
    net = common.build_resnet("resnet18", size)
    assert net.conv1.kernel_size == stem and net.fc.out_features == 10
    assert net(torch.zeros(2, 3, size, size)).shape == (2, 10)
    assert isinstance(net, torchvision.models.ResNet)


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_the_last_layer_starts_with_short_features(arch):
    torch.manual_seed(0)
    net, features = common.build_resnet(arch, 32), []
    net.fc.register_forward_pre_hook(lambda module, inputs: features.append(inputs[0]))
    with torch.no_grad():
        net(torch.randn(8, 3, 32, 32))
    assert features[0].mean(0).square().sum() < 20  # of ResNet-50 it was 297: the first steps threw the last layer off


def test_print_is_for_the_main_process(capsys):
    try:
        common.setup_for_distributed(False)
        print("suppressed")
        print("forced", force=True)
        common.setup_for_distributed(True)
        print("spoken", "twice", sep="-")
    finally:
        builtins.print = common._print
        common._is_master = True
    assert capsys.readouterr().out == "forced\nspoken-twice\n"


def test_seeds_differ_by_seed_epoch_and_rank():
    drawn = {}
    for key in [(s, e, r) for s in (0, 1, 2) for e in (0, 1, 2) for r in (0, 1, 2)] * 2:
        common.seed_everything(*key)
        numbers = torch.rand(()).item(), np.random.rand(), torch.randint(10**9, ()).item()
        assert drawn.setdefault(key, numbers) == numbers
    assert len(set(drawn.values())) == len(drawn) == 27
