# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/contact_sheet.py: the images of a test run on one sheet."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

TOOL = Path(__file__).resolve().parents[2] / 'tools' / 'analysis_tools' / 'contact_sheet.py'
COLOURS = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0), (0, 200, 200)]


def run(*args):
    return runpy.run_path(str(TOOL))['main']([str(arg) for arg in args])


@pytest.fixture
def show_dir(tmp_path):
    """Five one-coloured images, as mmdet (.jpg) and mmseg (.png in sub-folders) name them."""
    folder = tmp_path / 'show'
    (folder / 'vis_data' / 'vis_image').mkdir(parents=True)
    for i, colour in enumerate(COLOURS[:3]):
        Image.new('RGB', (320, 160), colour).save(folder / f'{i:012d}.jpg')
    for i, colour in enumerate(COLOURS[3:]):
        Image.new('RGB', (320, 160), colour).save(folder / 'vis_data' / 'vis_image' / f'test_ADE_val_{i}.PNG')
    return folder


def shown(sheet):
    """Indices of the colours found on the sheet, by their place from the top left."""
    pixels = np.asarray(Image.open(sheet).convert('RGB')).astype(int)
    places = {}
    for i, colour in enumerate(COLOURS):
        ys, xs = np.nonzero(np.abs(pixels - colour).max(axis=-1) < 12)
        if len(ys) > 1000:
            places[i] = (ys.min(), xs.min())
    return sorted(places, key=places.get)


def test_pictures_in_order_and_evenly_spread(show_dir, tmp_path, capsys):
    sheet = tmp_path / 'new' / 'deep' / 'sheet.png'
    assert run(show_dir, sheet, '--width', 200) == 0
    assert shown(sheet) == [0, 1, 2, 3, 4] and [path.name for path in sheet.parent.iterdir()] == ['sheet.png']
    assert capsys.readouterr().out == f'{sheet}: 5 of 5 images in 3 rows\n'
    with Image.open(sheet) as picture:
        assert picture.format == 'PNG'
        assert 2 * 200 < picture.width < 2 * 260 and 3 * 100 < picture.height < 3 * 170
    for number, expected in ((3, [0, 2, 4]), (1, [0])):
        run(show_dir, sheet, '--num', number, '--cols', 3, '--width', 100)
        assert shown(sheet) == expected and Image.open(sheet).width == pytest.approx(number * 112, abs=20)


def test_labels_are_written_above_each_part(show_dir, tmp_path):
    def ink(*args):
        run(show_dir, tmp_path / 'sheet.png', '--num', 1, '--width', 300, *args)
        pixels = np.asarray(Image.open(tmp_path / 'sheet.png').convert('L'))[:56]  # above the image
        return [half.sum() for half in np.array_split(pixels < 128, 2, axis=1)]

    (bare_left, bare_right), (left, right) = ink('--heads'), ink()
    assert bare_left > 50 and bare_right == 0  # the file's name only
    assert left > bare_left + 50 and right > 50


def test_broken_pictures_and_an_earlier_sheet_are_left_out(show_dir, capsys):
    (show_dir / '000000000001.jpg').write_bytes(b'no image')
    for _ in range(2):
        assert run(show_dir, show_dir / 'a_sheet.png') == 0
        said = capsys.readouterr()
        assert 'warning: left out' in said.err and '000000000001.jpg' in said.err
        assert said.out.endswith(': 4 of 5 images in 2 rows\n')
    assert shown(show_dir / 'a_sheet.png') == [0, 2, 3, 4]
