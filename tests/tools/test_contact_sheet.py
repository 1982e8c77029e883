# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/contact_sheet.py: the images of a test run on one sheet."""

import numpy as np
import pytest
from helpers.tool_runs import in_this_process
from PIL import Image

COLOURS = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0), (0, 200, 200)]


def shown(sheet):
    """Return the indices of the colours on the sheet, in order from the top left."""
    pixels = np.asarray(Image.open(sheet).convert('RGB')).astype(int)
    places = {}
    for i, colour in enumerate(COLOURS):
        ys, xs = np.nonzero(np.abs(pixels - colour).max(axis=-1) < 12)
        if len(ys) > 1000:
            places[i] = (ys.min() // 20, xs.min())
    return sorted(places, key=places.get)


@pytest.mark.parametrize(('number', 'expected'), [(3, [0, 2, 4]), (1, [0])])
def test_pictures_in_order_and_evenly_spread(tmp_path, capsys, number, expected):
    """Named as mmdet (.jpg) and mmseg (.png in sub-folders) do; an earlier sheet is left out."""
    names = ['0.jpg', '1.jpg', '2.jpg', 'vis_data/vis_image/val_3.PNG', 'vis_data/vis_image/val_4.PNG']
    (tmp_path / 'vis_data' / 'vis_image').mkdir(parents=True)
    for name, colour in zip(names, COLOURS):
        Image.new('RGB', (320, 160), colour).save(tmp_path / name)
    sheet = tmp_path / 'sheet.png'
    for _ in range(2):
        in_this_process('analysis_tools/contact_sheet.py', tmp_path, sheet, '--num', number)
        assert capsys.readouterr().out == f'{sheet}: {len(expected)} of 5 images\n'
    assert shown(sheet) == expected
    with Image.open(sheet) as picture:
        assert picture.width == 640 * min(len(expected), 2)
        above = np.asarray(picture.convert('L'))[:35, :640] < 128
        assert all(part.any() for part in np.array_split(above, 2, axis=1))  # labels of both halves
