# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tools of ``tools/analysis_tools``. Most tests of ablation studies are in ``projects/studies``."""

import contextlib
import json
import re
import runpy

import numpy as np
import pytest
from helpers.own_files import coco_dict, picture, text
from helpers.tool_runs import QUICK, ROOT, TOOLS, in_this_process
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
    truth = text(tmp_path / 'truth.json', coco_dict(['a.png'], size=(100, 100), bbox=box, area=1600, iscrowd=0))
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


# -- inspect_attention ------------------------------------------------------------------------------------------------

INSPECT = 'analysis_tools/inspect_attention.py'
CLASSIFIER = QUICK['mmpretrain']
MEASURES = {'rank', 'confusion', 'locality', 'sharpness', 'ccs'}


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8)
    return picture(tmp_path / 'photo.png', pixels)


@pytest.fixture
def inspect(tmp_path):
    """Return a function that runs the tool, and returns its summary and the other files."""

    def run(*args, out=tmp_path / 'new' / 'out'):
        in_this_process(INSPECT, *args, '--out', out)
        files = {path.relative_to(out).as_posix() for path in out.rglob('*') if path.is_file()}
        return json.loads((out / 'summary.json').read_text()), files - {'summary.json'}

    return run


def test_everything_of_a_classifier_without_checkpoint(photo, inspect):
    pytest.importorskip('mmpretrain')
    summary, files = inspect(CLASSIFIER, 'none', photo, '--query', 70, 30, '--num-queries', 16)
    blocks = summary['blocks']
    assert summary['checkpoint'] == 'none' and summary['settings']['num_queries'] == 16 and summary['version']
    assert [block['mixer'] for block in blocks] == ['rala', 'rala', 'softmax', 'softmax', 'softmax']
    assert [block['map'] for block in blocks] == [[16, 16], [8, 8], [4, 4], [4, 4], [2, 2]]  # resized to 64 x 64
    assert [block['heads'] for block in blocks] == [1, 2, 4, 4, 5]
    for block in blocks:
        assert block['forward_error'] < 1e-5 and MEASURES <= set(block)
    assert blocks[0]['ccs'] is None and -1 <= blocks[1]['ccs'] <= 1
    # the image is 140 wide and 90 high, the network sees 64 x 64
    (image,) = summary['images']
    assert (image['query'], image['query_shown'], image['shown']) == ([70, 30], [32, 21], [64, 64])
    maps = {f'maps/photo_{rest}.png' for rest in ('full', 'query_70_30')}
    assert files == {f'{name}.png' for name in MEASURES} | maps


def test_several_pictures_of_any_size_and_some_of_it(photo, inspect):
    """Use an odd size instead of the pipeline's. Average numbers over images, and list differing sizes."""
    pytest.importorskip('mmpretrain')
    other = picture(photo.with_name('other.png'), np.full((90, 140, 3), (200, 0, 0), np.uint8))
    args = '--shape', 75, 101, '--num-queries', 8, '--what', 'locality'
    both, files = inspect(CLASSIFIER, 'none', photo, other, *args, 'maps')
    at = 'query_{}_{}'.format(*both['images'][0]['query'])
    maps = [f'maps/{name}_{rest}.png' for name in ('0_photo', '1_other') for rest in ('full', at)]
    assert {'locality.png', *maps} <= files
    block = both['blocks'][0]
    assert block['map'] == [19, 26] and 'rank' not in block and block['sampled_queries'] == 8
    assert block['locality']['chance'] == pytest.approx(9 / 19 / 26)
    assert [image['query'] for image in both['images']] == [[70, 45]] * 2  # the middle
    merged = runpy.run_path(str(TOOLS / INSPECT))['merged']
    blocks = [[dict(block='a', map=[4, size], rank=float(size), key_map=[2, 2])] for size in (6, 9, 6)]
    assert merged(blocks) == [dict(block='a', map=[[4, 6], [4, 9], [4, 6]], key_map=[2, 2], rank=7.0)]
