# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/inspect_attention.py on configs of the three tasks."""

import json
import runpy

import numpy as np
import pytest
from helpers.tool_runs import QUICK, TOOLS, in_this_process
from PIL import Image

TOOL = 'analysis_tools/inspect_attention.py'
CLASSIFIER = QUICK['mmpretrain']
MEASURES = {'rank', 'confusion', 'locality', 'sharpness', 'ccs'}


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / 'photo.png'
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def inspect(tmp_path):
    """Return a function that runs the tool, and returns its summary and the other files."""

    def run(*args, out=tmp_path / 'new' / 'out'):
        in_this_process(TOOL, *args, '--out', out)
        files = {path.relative_to(out).as_posix() for path in out.rglob('*') if path.is_file()}
        return json.loads((out / 'summary.json').read_text()), files - {'summary.json'}

    return run


def test_everything_of_a_classifier_without_checkpoint(picture, inspect):
    pytest.importorskip('mmpretrain')
    summary, files = inspect(CLASSIFIER, 'none', picture, '--query', 70, 30, '--num-queries', 16)
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


def test_several_pictures_of_any_size_and_some_of_it(picture, inspect):
    """Use an odd size instead of the pipeline's. Average numbers over images, and list differing sizes."""
    pytest.importorskip('mmpretrain')
    other = picture.with_name('other.png')
    Image.new('RGB', (140, 90), (200, 0, 0)).save(other)
    args = '--shape', 75, 101, '--num-queries', 8, '--what', 'locality'
    both, files = inspect(CLASSIFIER, 'none', picture, other, *args, 'maps')
    at = 'query_{}_{}'.format(*both['images'][0]['query'])
    maps = [f'maps/{name}_{rest}.png' for name in ('0_photo', '1_other') for rest in ('full', at)]
    assert {'locality.png', *maps} <= files
    block = both['blocks'][0]
    assert block['map'] == [19, 26] and 'rank' not in block and block['sampled_queries'] == 8
    assert block['locality']['chance'] == pytest.approx(9 / 19 / 26)
    assert [image['query'] for image in both['images']] == [[70, 45]] * 2  # the middle
    merged = runpy.run_path(str(TOOLS / TOOL))['merged']
    blocks = [[dict(block='a', map=[4, size], rank=float(size), key_map=[2, 2])] for size in (6, 9, 6)]
    assert merged(blocks) == [dict(block='a', map=[[4, 6], [4, 9], [4, 6]], key_map=[2, 2], rank=7.0)]
