"""common.py: the data, its augmentation, the network, printing."""

import builtins
import hashlib
import http.server
import pickle
import shutil
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from torchvision.datasets import CIFAR10

import common


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serve the files of a folder, the first answer only after a second. It has `url`, `folder` and `asked`."""
    folder = tmp_path / "server"
    folder.mkdir()
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=folder)

        def log_message(self, *args):  # called in each request
            server.asked.append(self.path)
            time.sleep(len(server.asked) == 1)  # meanwhile, other processes want the file, too

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url, server.folder, server.asked = f"http://127.0.0.1:{server.server_port}", folder, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def four_at_once(function, *arguments):  # threads, which wait for a lock on a file like processes
    with ThreadPoolExecutor(4) as pool:
        return [future.result() for future in [pool.submit(function, *arguments) for _ in range(4)]]


def load_labels(folder):
    train, test = common.load_cifar10(folder, limit=30)
    return train.tensors[1].tolist(), test.tensors[1].tolist()


def test_cifar10_is_downloaded_once_and_checked(server, tmp_path, monkeypatch):
    files = tmp_path / "made" / "cifar-10-batches-py"
    files.mkdir(parents=True)
    labels = [*range(10)] * 2
    for name, *_ in [*CIFAR10.train_list, *CIFAR10.test_list, ["batches.meta"]]:
        images = np.random.randint(0, 256, (20, 3072), np.uint8)
        (files / name).write_bytes(pickle.dumps(dict(data=images, labels=labels, label_names=[])))
    shutil.make_archive(server.folder / "cifar", "gztar", files.parent)
    archive = (server.folder / "cifar.tar.gz").read_bytes()
    md5 = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in files.iterdir()}
    monkeypatch.setattr(CIFAR10, "url", f"{server.url}/cifar.tar.gz")
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive).hexdigest())
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5[name]] for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [[name, md5[name]] for name, _ in CIFAR10.test_list])
    monkeypatch.setitem(CIFAR10.meta, "md5", md5["batches.meta"])
    assert four_at_once(load_labels, tmp_path / "new" / "data") == [(labels + labels[:10], labels)] * 4
    assert len(server.asked) == 2  # torchvision asks twice for one download: where it is, and for it
    monkeypatch.setattr(CIFAR10, "tgz_md5", "0" * 32)
    with pytest.raises(SystemExit, match="no data: File not found or corrupted.; put cifar-10-python.tar.gz into"):
        common.load_cifar10(tmp_path / "other")


def load_pretrained():
    net = common.build_resnet("resnet18", 65, pretrained=True, freeze_backbone=True)
    trained = [name for name, weight in net.named_parameters() if weight.requires_grad]
    return net.layer1[0].conv1.weight[0, 0, 0].tolist(), net.fc.out_features, trained


def test_imagenet_weights_are_downloaded_once_and_only_the_last_layer_is_trained(server, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    net = torchvision.models.resnet18()
    torch.save(net.state_dict(), tmp_path / "weights")
    name = f"resnet18-{hashlib.sha256((tmp_path / 'weights').read_bytes()).hexdigest()[:8]}.pth"
    (tmp_path / "weights").rename(server.folder / name)
    weights = SimpleNamespace(DEFAULT=SimpleNamespace(url=f"{server.url}/{name}"))
    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda arch: weights)
    expected = (net.layer1[0].conv1.weight[0, 0, 0].tolist(), 10, ["fc.weight", "fc.bias"])
    assert four_at_once(load_pretrained) == [expected] * 4 and len(server.asked) == 1


def test_prepare_normalises_and_shifts_and_flips_each_image_on_its_own():
    # The same picture 500 times; its pixels hold their row and column. Each result must be one of 162 pictures.
    picture = np.stack(np.meshgrid(np.arange(20), np.arange(40), [0], indexing="ij"), 3)[:, :, 0].astype(np.uint8)
    pad = np.pad(picture, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    possible = {pad[y : y + 20, x : x + 40][:, ::i].tobytes() for y in range(9) for x in range(9) for i in (1, -1)}
    images = torch.from_numpy(picture).expand(500, 20, 40, 3)
    torch.manual_seed(0)
    shifted = common.shift_and_flip(images)
    seen = {image.numpy().tobytes() for image in shifted}
    assert len(possible) == 162 and seen <= possible and len(seen) > 140
    torch.manual_seed(0)
    assert torch.equal(common.prepare(images, 32, augment=True), common.prepare(shifted, 32))
    square, (mean, std) = images[:, :, :20], torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]])
    torch.testing.assert_close(common.prepare(square, 20), ((square / 255 - mean) / std).permute(0, 3, 1, 2))


def test_only_the_main_process_prints_to_the_screen(capsys, monkeypatch):
    monkeypatch.setattr(builtins, "print", print)  # put back at the end
    common.setup_for_distributed(is_master=False)
    print("silent")
    print("silent", file=sys.stdout)
    print("forced", "too", sep=", ", force=True)
    traceback.print_exc()  # it calls print(..., file=sys.stderr)
    assert capsys.readouterr() == ("forced, too\n", "NoneType: None\n")
