"""Image files of a user's own: grey and colour, sizes, and what is broken, by name."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from pfl_core import Experiment, Federation, run
from pfl_core.data import images

G = np.random.default_rng(0)


def pixels(mode="L", size=(6, 5)):
    rgba = Image.fromarray(G.integers(0, 256, (*size, 4), dtype=np.uint8))
    return rgba.convert("RGB").convert(mode) if mode != "RGBA" else rgba


def folder(root, clients=("ann", "bo"), classes=("cat", "dog"), n=3, **how):
    for client in clients:
        for label in classes:
            (root / client / label).mkdir(parents=True)
            for i in range(n):
                pixels(**how).save(root / client / label / f"{i}.png")
    return root


def read(root, **how):
    return Federation.from_folder(root, **dict(split="50/50") | how)


# -- what is read --------------------------------------------------------------------------------------------------------


def test_clients_classes_and_files_are_in_the_order_of_their_names(tmp_path):
    root = folder(tmp_path, ("10", "9", "bo"), ("b", "a"), n=11)
    fed = read(root)
    assert fed.client_names == ("9", "10", "bo") and fed.class_names == ("a", "b")
    files = [
        f"{c}/{label}/{i}.png"
        for c in fed.client_names
        for label in "ab"
        for i in sorted(map(str, range(11)))
    ]
    assert [np.asarray(Image.open(root / f)).tolist() for f in files] == fed.x.tolist()
    assert fed.y.tolist() == ([0] * 11 + [1] * 11) * 3 and fed.x.dtype == np.uint8


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "P"])
def test_grey_stays_grey_and_colour_is_rgb(tmp_path, mode):
    grey = mode in ("1", "L", "LA")
    fed = read(folder(tmp_path, mode=mode))
    assert fed.input_shape == ((1, 6, 5) if grey else (3, 6, 5))
    with Image.open(tmp_path / "ann" / "cat" / "0.png") as image:
        assert np.array_equal(fed.x[0], np.asarray(image.convert("L" if grey else "RGB")))
    assert read(tmp_path, colour=True).input_shape == (3, 6, 5)
    assert read(tmp_path, colour=False).input_shape == (1, 6, 5)


def test_one_colour_image_makes_all_rgb(tmp_path):
    pixels("RGB").save(folder(tmp_path) / "bo" / "dog" / "2.png")
    fed = read(tmp_path)
    assert fed.input_shape == (3, 6, 5)
    assert (fed.x[0] == fed.x[0][..., :1]).all() and not (fed.x[-1] == fed.x[-1][..., :1]).all()


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path):
    folder(tmp_path, mode="P")
    for path in tmp_path.rglob("*.png"):
        Image.open(path).save(path, transparency=bytes([0, 128, 255]))
    assert read(tmp_path).input_shape == (3, 6, 5)


@pytest.mark.parametrize(
    ("size", "shape"), [(4, (4, 4)), ((4, 7), (4, 7)), ([np.int64(6), 5], (6, 5))]
)
def test_sizes_are_resampled(tmp_path, size, shape):
    folder(tmp_path, ("ann",))
    folder(tmp_path, ("bo",), size=(9, 8))
    fed = read(tmp_path, size=size)
    assert fed.input_shape == (1, *shape)
    if shape == (6, 5):  # those of that size are not resampled
        assert np.array_equal(fed.x[0], np.asarray(Image.open(tmp_path / "ann/cat/0.png")))


@pytest.mark.parametrize("ending", images.SUFFIXES)
def test_endings(tmp_path, ending):
    for path in folder(tmp_path).rglob("*.png"):
        mode = "RGB" if ending == ".ppm" else "L"
        Image.open(path).convert(mode).save(
            path.with_suffix(ending.upper() if ending == ".jpg" else ending)
        )
        if ending != ".png":
            path.unlink()
    fed = read(tmp_path)
    assert len(fed.y) == 12 and fed.input_shape[1:] == (6, 5)


def test_what_is_no_image_beside_folders_does_not_count(tmp_path):
    before = read(folder(tmp_path / "set")).checksum
    for name in (
        "README.txt",
        "ann/notes.csv",
        ".DS_Store",
        "ann/.git/x.png",
        "ann/cat/.thumb.png",
    ):
        (tmp_path / "set" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "set" / name).write_text("")
    (tmp_path / "set" / "ann" / "empty").mkdir()
    fed = read(tmp_path / "set")
    assert fed.class_names == ("cat", "dog", "empty") and fed.checksum != before
    (tmp_path / "set" / "ann" / "empty").rmdir()
    assert read(tmp_path / "set").checksum == before


def test_a_run_over_images(tmp_path):
    fed = read(folder(tmp_path / "set", n=4, mode="RGB", size=(32, 32)))
    e = Experiment(dataset="own", model="lenet", rounds=1, batch=2, keep_models=True)
    result = run(e, fed=fed, store=tmp_path / "store", device="cpu")
    assert set(result.predict("bo", fed.x[:3], names=True)) <= {"cat", "dog"}


# -- what is broken ------------------------------------------------------------------------------------------------------


def put(name, content=b""):
    def happens(root):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)

    return happens


def half(name):
    def happens(root):
        big = Image.fromarray(G.integers(0, 256, (60, 50), dtype=np.uint8))
        big.save(raw := io.BytesIO(), "png")
        (root / name).write_bytes(raw.getvalue()[:900])
        for other in root.rglob("*.png"):
            if other != root / name:
                big.save(other)

    return happens


def several(root):
    for i in range(3):
        for client in ("ann", "bo"):
            (root / client / "cat" / f"{i}.png").write_bytes(b"no")


def image(name, mode="L", size=(5, 6), **how):
    def happens(root):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size).save(root / name, **how)

    return happens


def link(name, to):
    def happens(root):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(root / to)

    return happens


BROKEN = {
    "one image by a link": (link("bo/cat/9.png", "ann/cat/0.png"), "one image at two places, ann/cat/0.png, bo/cat/9.png: a link; list each image once"),
    "one class by a link": (link("bo/eel", "bo/cat"), "one image at two places, bo/cat/0.png, bo/eel/0.png"),
    "one client by a link": (link("cy", "bo"), "one image at two places, bo/cat/0.png, cy/cat/0.png"),
    "a client that is a link to nothing": (link("cy", "gone"), r"links to nothing \(cy\)"),
    "a class that is a link to itself": (link("bo/eel", "bo/eel"), r"links to nothing \(bo/eel\)"),
    "an image that is a link to itself": (link("bo/cat/9.png", "bo/cat/9.png"), r"no images \(bo/cat/9.png\)"),
    "an image that is a link to nothing": (link("bo/cat/9.png", "gone.png"), r"no images \(bo/cat/9.png\)"),
    "a pipe among images": (lambda root: os.mkfifo(root / "bo" / "cat" / "9.png"), r"no images \(bo/cat/9.png\)"),
    "what a Mac packs": (image("__MACOSX/ann/cat/._1.png"), r"no images \(__MACOSX/ann/cat\)"),
    "what Windows leaves": (put("ann/cat/Thumbs.db"), r"no images \(ann/cat/Thumbs.db\); expected .* take the others away"),
    "no bytes": (put("ann/cat/1.png"), r"1 of 12 images of .* cannot be read \(ann/cat/1.png; the first: cannot identify image file\); replace them"),
    "a text": (put("bo/dog/9.jpg", b"hello"), r"1 of 13 images .*bo/dog/9.jpg"),
    "half an image": (half("ann/cat/1.png"), r"1 of 12 images .*ann/cat/1.png; the first: .*truncated"),
    "many": (several, r"6 of 12 images of .*ann/cat/0.png, .* and 1 more"),
    "16 bits": (image("ann/cat/1.png", "I;16"), r"1 images of .* more than 8 bits a channel \(ann/cat/1.png\)"),
    "32 bits": (image("ann/cat/x.tif", "F"), "more than 8 bits"),
    "another size": (image("bo/cat/1.png", size=(7, 8)), r"differ in size \(height, width\): ann/cat/0.png has \(6, 5\), bo/cat/1.png has \(8, 7\); give size="),
    "a table among images": (put("ann/cat/labels.csv"), r"1 files or folders in folders of classes that are no images \(ann/cat/labels.csv\)"),
    "a folder among images": (image("ann/cat/deep/1.png"), r"no images \(ann/cat/deep\); expected is CLIENT/CLASS/IMAGE"),
    "an image of no class": (image("ann/1.png"), r"images in no folder of a client's class \(ann/1.png\)"),
    "an image of no client": (image("1.png"), r"images in no folder of a client's class \(1.png\)"),
    "an empty client": (lambda root: (root / "cy").mkdir(), r"needs: 'cy' \(0\); leave them out with small='drop'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named(tmp_path, case):
    happens, says = BROKEN[case]
    happens(folder(tmp_path))
    with pytest.raises(ValueError, match=says):
        read(tmp_path)


def test_links_to_images_elsewhere_are_images(tmp_path):
    """A folder of links to a common pool of images is no copy: each once."""
    folder(tmp_path / "pool")
    for i, file in enumerate(sorted((tmp_path / "pool").rglob("*.png"))):
        place = tmp_path / "set" / "ab"[i % 2] / "x" / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(file)
    assert read(tmp_path / "set").client_names == ("a", "b")


def test_empty_clients_may_be_left_out_and_cannot_train(tmp_path):
    (folder(tmp_path) / "cy" / "cat").mkdir(parents=True)
    assert read(tmp_path, small="drop").client_names == ("ann", "bo")
    with pytest.raises(ValueError, match=r"'cy' \(0\)"):
        read(tmp_path, small="train")


@pytest.mark.parametrize("there", ["nothing", "a file", "an empty folder", "empty folders"])
def test_a_folder_without_an_image_is_named(tmp_path, there):
    root = tmp_path / "set"
    if there == "a file":
        root.write_text("")
    elif there != "nothing":
        (root / "a" / "b" if there == "empty folders" else root).mkdir(parents=True)
    says = "is no folder" if there in ("nothing", "a file") else "holds no image"
    with pytest.raises(ValueError, match=f"{says}.*CLIENT/CLASS/IMAGE, such as anna/cat/1.png"):
        read(root)


@pytest.mark.parametrize("size", [0, -1, 1.5, (4,), (4, 5, 6), "4", (4, None), True])
def test_sizes_that_are_none(tmp_path, size):
    with pytest.raises(
        ValueError, match=r"size=.*allowed is a number of pixels, or \(height, width\)"
    ):
        read(folder(tmp_path), size=size)


def test_colour_is_a_choice_of_three(tmp_path):
    with pytest.raises(ValueError, match="colour='RGB': allowed are True, False, and None"):
        read(folder(tmp_path), colour="RGB")


def test_a_file_that_may_not_be_read_is_the_systems_error(tmp_path, monkeypatch):
    folder(tmp_path)

    def refused(*args, **how):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Image, "open", refused)
    with pytest.raises(PermissionError):
        read(tmp_path)
