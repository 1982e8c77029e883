# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""FLOPs, contact sheets, and ablation studies, of which ``projects/studies`` has the code and most tests."""

import contextlib
import json
import re

import numpy as np
import pytest
from helpers.own_files import coco, picture, text
from helpers.tool_runs import ROOT, in_this_process
from PIL import Image


def test_totals_follow_the_config_and_nothing_is_downloaded(monkeypatch, capsys):
    pytest.importorskip('mmdet')
    monkeypatch.setattr('torch.hub.download_url_to_file', lambda *_, **__: pytest.fail('a download'))
    config, totals = ROOT / 'configs/mmdet/ravlt_t_maskrcnn_1x.py', []
    for options in ([], ['--cfg-options', 'model.roi_head.bbox_head.num_classes=10']):
        in_this_process('analysis_tools/get_flops.py', config, '--shape', 320, 480, *options)
        out = capsys.readouterr().out
        (total,) = re.findall(r'^total.*', out, re.M)
        assert 'backbone.stage4' in out
        totals.append(float(total.split()[1]))
    assert totals[0] == pytest.approx(33.50, abs=0.01)
    assert totals[0] - totals[1] == pytest.approx(70 * 5 * 1025 / 1e6, abs=0.002)


@pytest.mark.slow
def test_a_study_writes_its_results_and_resumes(tmp_path):
    found, quick = [], '--iterations=2 --batch=4 --num-train=8 --num-val=8 --seeds=1'.split()
    for variants in (['full'], ['full', 'without CPE']):
        words = ['--study', 'rala', '--out', tmp_path, '--variants', *variants, *quick]
        in_this_process('analysis_tools/ablation_study.py', *words)
        found.append(json.loads((tmp_path / 'results.json').read_text())['runs'])
        assert [(run['variant'], run['seed']) for run in found[-1]] == [(variant, 0) for variant in variants]
        assert all(f'| {variant} | 1 |' in (tmp_path / 'table.md').read_text() for variant in variants)
    assert found[0] == found[1][:1] and (tmp_path / 'plot.png').stat().st_size > 1000


def test_objects_are_drawn_once_and_in_the_colour_of_their_class(tmp_path, capsys):
    """Include two predictions of different classes on one object, and one of a low score."""
    picture(tmp_path / 'a.png', np.full((100, 100, 3), 90, np.uint8))
    box, other = [10, 10, 40, 40], [60, 60, 30, 30]
    truth = text(tmp_path / 'truth.json', coco(['a.png'], size=(100, 100), bbox=box, area=1600, iscrowd=0))
    found = [(7, box, 0.9), (3, [11, 10, 40, 40], 0.8), (3, other, 0.3)]
    found = [dict(image_id=10, category_id=key, bbox=bbox, score=score) for key, bbox, score in found]
    words = ['--annotations', truth, '--images', tmp_path]

    def draw(content, said=''):
        text(tmp_path / 'found.json', content)
        with pytest.raises(SystemExit) if said else contextlib.nullcontext():
            in_this_process('analysis_tools/contact_sheet.py', tmp_path / 'found.json', tmp_path / 'sheet.png', *words)
        out, err = capsys.readouterr()
        assert said in err
        return out

    assert draw(found).endswith('sheet.png: 1 of 1 images\n')
    drawn = np.asarray(Image.open(tmp_path / 'sheet.png').convert('RGB')).astype(int)[:-60]  # above the legend
    blue, orange = ((np.abs(drawn - colour).max(axis=-1) < 12).sum() for colour in ((31, 119, 180), (255, 127, 14)))
    assert blue > 500 and orange == 0
    draw([])
    draw('id,score', "found.json' cannot be read as JSON: ")
    draw(dict(images=[]), 'expected a list')
    draw([dict(image_id=5)], 'expected a list of COCO results')
    draw([dict(found[0], image_id=9)], 'image_id=9 is not in')
    draw([dict(found[0], category_id=4)], 'category_id=4 is not in')
    text(truth, {})
    draw(found, "truth.json' has no list of images")
