# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/contact_sheet.py: the images of a test run on one sheet."""

import numpy as np
import pytest
from helpers.tool_runs import in_this_process
from PIL import Image

COLOURS = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0), (0, 200, 200)]


@pytest.mark.parametrize(('number', 'expected'), [(3, [0, 2, 4]), (1, [0])])
def test_pictures_in_order_and_evenly_spread(tmp_path, capsys, number, expected):
    """Names of mmdet (.jpg) and mmseg (.png in sub-folders); an earlier sheet is left out."""
    names = ['0.jpg', '1.jpg', '2.jpg', 'vis_data/vis_image/val_3.PNG', 'vis_data/vis_image/val_4.PNG']
    (tmp_path / 'vis_data' / 'vis_image').mkdir(parents=True)
    for name, colour in zip(names, COLOURS):
        Image.new('RGB', (320, 160), colour).save(tmp_path / name)
    sheet = tmp_path / 'sheet.png'
    for _ in range(2):
        in_this_process('analysis_tools/contact_sheet.py', tmp_path, sheet, '--num', number)
        assert capsys.readouterr().out == f'{sheet}: {len(expected)} of 5 images\n'
    pixels = np.asarray(Image.open(sheet).convert('RGB')).astype(int)
    places = {}  # of the colours
    for i, colour in enumerate(COLOURS):
        ys, xs = np.nonzero(np.abs(pixels - colour).max(axis=-1) < 12)
        if len(ys) > 1000:
            places[i] = (ys.min() // 20, xs.min())
    assert sorted(places, key=places.get) == expected and pixels.shape[1] == 640 * min(len(expected), 2)
