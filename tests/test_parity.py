"""The comparison with other people's code: images by hash, the page, and the numbers it is made from."""

import hashlib
import json
import re

import numpy as np
import pytest

from benchmarks import common, parity
from pfl_core.data import pools

TINY = dict(model="mlp", model_args={"hidden": 4}, batch=4, lr=0.05, rounds=2, normalize="half")
CASES = {
    "fedavg": parity.Case("one", TINY | dict(method="fedavg", eval_after=False)),
    "fedprox": parity.Case(
        "two", TINY | dict(method="fedprox", eval_after=True), mean="client", args="in words"
    ),
    "local": parity.Case("one", TINY | dict(method="local")),
}
CURVES = {
    "fedavg": {"code": "someone/library abc1234", "args": "-a 1", "test_acc": [0.1, 0.2, 0.9]},
    "fedprox": {
        "code": "other/code 9876543 (mended)",
        "args": "not to be quoted",
        "before": [0.1, 0.2, 0.1234],
        "after": [0.2, 0.3, 0.4],
    },
}


def name(image):
    return int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:8], "big")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """48 images for 3 clients of 12 + 4; three more are named that nobody has. All files are the test's own."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (48, 32, 32, 3), dtype=np.uint8), np.arange(48) % 10
    np.savez(tmp_path / "cifar10.npz", x=x, y=y, is_test=np.arange(48) >= 36)
    names = np.array([name(image) for image in x], np.uint64)[::-1]  # not in the pool's order
    lists = {f"train{k}": names[12 * k : 12 * k + 12] for k in range(3)}
    lists |= {f"test{k}": names[36 + 4 * k : 40 + 4 * k] for k in range(3)}
    lists["train1"] = np.append(lists["train1"], np.array([1, 2], np.uint64))
    lists["test2"] = np.append(np.array([3], np.uint64), lists["test2"])
    np.savez(tmp_path / "split.npz", **lists)
    (tmp_path / "curves.json").write_text(json.dumps({"curves": CURVES}))
    (tmp_path / "parity.md").write_text(f"# Before\n\n{parity.BEGIN}\n{parity.END}\n\nAfter.\n")
    monkeypatch.setenv("PFL_DATA", str(tmp_path))
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(parity, "PAGE", tmp_path / "parity.md")
    monkeypatch.setattr(parity, "CASES", CASES)
    return tmp_path


def test_images_are_found_by_hash_and_missing_ones_counted(folder):
    pool = pools.load("cifar10")
    fed, images = parity.clients_of(pool, folder / "split.npz")
    assert images == {"train": [38, 2], "test": [13, 1]} and fed.K == 3 and fed.classes == 10
    for k, (train, test) in enumerate(zip(fed.index["train"], fed.index["test"], strict=True)):
        at = [47 - i for i in range(12 * k, 12 * k + 12)]
        assert (fed.x[train] == pool.x[at]).all() and (fed.y[train] == pool.y[at]).all()
        at = [47 - i for i in range(36 + 4 * k, 40 + 4 * k)]
        assert (fed.x[test] == pool.x[at]).all()


def test_numbers_are_kept_and_the_page_is_made_of_them(folder):
    parity.main(["--parity", str(folder)])
    text = (folder / "parity.md").read_text()
    cases = json.loads((folder / "parity.json").read_text())["cases"]
    assert set(cases) == set(CURVES) and cases["fedavg"]["theirs"] == {"before": [10, 20, 90]}
    ours = cases["fedavg"]["ours"]["before"]
    assert set(ours) == {"0", "1"} and {len(c) for c in ours.values()} == {3}
    assert {"device", "torch", "commit", "pfl_core"} <= set(cases["fedavg"]["about"])
    last = [c[-1] for c in ours.values()]
    mean = sum(last) / 2
    assert (
        "| FedAvg | [someone/library abc1234](https://github.com/someone/library/tree/abc1234) | `-a 1` "
        f"| 2 | 90.0 | {mean:.1f} | {last[0]:.1f}, {last[1]:.1f} | {mean - 90:+.1f} |" in text
    )
    assert (
        "| FedProx, after local training |" in text and "(mended) | `in words` | 2 | 40.0 |" in text
    )
    assert "not to be quoted" not in text + json.dumps(cases)
    assert (
        "more than 2 points outside of the range of our seeds for: FedAvg" in text
    )  # 90 % by chance
    assert "Not run yet: Local." in text and "One seed only" not in text
    assert "`split.npz`: 2 of 38 train images, 1 of 13 test images" in text
    assert text.startswith("# Before\n") and text.endswith("\n\nAfter.\n")
    assert (folder / "parity.png").stat().st_size > 10_000
    assert str(folder) not in text + json.dumps(cases)
    parity.main([])
    assert (folder / "parity.md").read_text() == text


def test_a_single_seed_is_said_and_a_trial_keeps_nothing(folder):
    parity.main(["fedavg", "--parity", str(folder), "--rounds", "1", "--seeds", "3"])
    assert not (folder / "parity.json").exists()
    parity.main(["fedavg", "--parity", str(folder), "--seeds", "3"])
    text = (folder / "parity.md").read_text()
    assert "One seed only: FedAvg." in text and "Not run yet: FedProx, Local." in text


@pytest.mark.parametrize(
    "methods, curves, message",
    [
        (["local"], {}, "local: not in curves.json, which has fedavg, fedprox"),
        ([], {"new": CURVES["fedavg"]}, "new: not in CASES of benchmarks/parity.py"),
        ([], {"fedavg": CURVES["fedavg"] | {"test_acc": [0.1]}}, "1 values; .* evaluated 3 times"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_trained(folder, methods, curves, message):
    (folder / "curves.json").write_text(json.dumps({"curves": CURVES | curves}))
    with pytest.raises(ValueError, match=message):
        parity.main([*methods, "--parity", str(folder)])
    assert not (folder / "runs").exists()


def test_noise_is_counted_from_the_range_of_our_seeds():
    assert parity.Line("m", {}, 60.0, [61.0, 63.0]).beyond == 1
    assert parity.Line("m", {}, 60.0, [50.0, 57.0]).beyond == 3
    assert parity.Line("m", {}, 60.0, [59.0, 63.0]).beyond == 0


def test_the_committed_page_is_what_the_committed_numbers_say():
    cases, text = parity.kept(), parity.PAGE.read_text()
    assert cases and parity.page(text, cases) == text, "run: python -m benchmarks.parity"
    assert parity.PAGE.with_suffix(".png").is_file()
    raw = (common.RESULTS / "parity.json").read_text()
    assert not re.search(r"[\s\"']/\w", raw)  # no path of the computer that ran it
    for key, case in cases.items():
        assert case["fields"] == json.loads(json.dumps(parity.CASES[key].fields)), key
        at = len(case["rounds"])
        both = [*case["theirs"].values(), *(c for v in case["ours"].values() for c in v.values())]
        assert {len(c) for c in both} == {at} and 0 <= np.min(both) <= np.max(both) <= 100


def test_a_page_without_its_markers_is_refused():
    with pytest.raises(ValueError, match="must hold the lines"):
        parity.page("# A page\n", {})
