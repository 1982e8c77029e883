# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/contact_sheet.py: the objects of a test on one sheet."""

import contextlib
import json

import numpy as np
import pytest
from helpers.tool_runs import in_this_process
from PIL import Image


def test_objects_are_drawn_once_and_in_the_colour_of_their_class(tmp_path, capsys):
    """Include two predictions of different classes on one object, and one of a low score."""
    Image.new('RGB', (100, 100), (90, 90, 90)).save(tmp_path / 'a.png')
    box, other = [10, 10, 40, 40], [60, 60, 30, 30]
    categories = [dict(id=3, name='disc'), dict(id=7, name='square')]
    truth = [dict(id=1, image_id=5, category_id=3, bbox=box, area=1600, iscrowd=0)]
    images = [dict(id=5, file_name='a.png', width=100, height=100)]
    (tmp_path / 'truth.json').write_text(json.dumps(dict(images=images, annotations=truth, categories=categories)))
    found = [(3, box, 0.9), (7, [11, 10, 40, 40], 0.8), (7, other, 0.3)]
    found = [dict(image_id=5, category_id=key, bbox=bbox, score=score) for key, bbox, score in found]
    (tmp_path / 'found.json').write_text(json.dumps(found))
    words = ['--annotations', tmp_path / 'truth.json', '--images', tmp_path]
    in_this_process('analysis_tools/contact_sheet.py', tmp_path / 'found.json', tmp_path / 'sheet.png', *words)
    assert capsys.readouterr().out.endswith('sheet.png: 1 of 1 images\n')
    drawn = np.asarray(Image.open(tmp_path / 'sheet.png').convert('RGB')).astype(int)[:-60]  # above the legend
    blue, orange = ((np.abs(drawn - colour).max(axis=-1) < 12).sum() for colour in ((31, 119, 180), (255, 127, 14)))
    assert blue > 500 and orange == 0
    for content, said in (
        ('[]', ''),
        ('id,score', "found.json' cannot be read as JSON: "),
        ('{"images": []}', 'expected a list'),
        ('[{"image_id": 5}]', 'expected a list of COCO results'),
        (json.dumps([dict(found[0], image_id=9)]), 'image_id=9 is not in'),
        (json.dumps([dict(found[0], category_id=4)]), 'category_id=4 is not in'),
    ):
        (tmp_path / 'found.json').write_text(content)
        with pytest.raises(SystemExit) if said else contextlib.nullcontext():
            in_this_process('analysis_tools/contact_sheet.py', tmp_path / 'found.json', tmp_path / 'sheet.png', *words)
        assert said in capsys.readouterr().err
    (tmp_path / 'truth.json').write_text('{}')
    with pytest.raises(SystemExit):
        in_this_process('analysis_tools/contact_sheet.py', tmp_path / 'found.json', tmp_path / 'sheet.png', *words)
    assert "truth.json' has no list of images" in capsys.readouterr().err
