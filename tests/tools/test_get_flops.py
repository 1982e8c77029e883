# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/get_flops.py: its table and its options."""

import re

import pytest
from helpers.tool_runs import ROOT, in_this_process


def test_it_prints_totals_and_downloads_nothing(monkeypatch, capsys):
    pytest.importorskip('mmdet')
    monkeypatch.setattr('torch.hub.download_url_to_file', lambda *_, **__: pytest.fail('a download'))
    config, totals = ROOT / 'configs/mmdet/ravlt_t_maskrcnn_1x.py', []
    for options in ([], ['--cfg-options', 'model.roi_head.bbox_head.num_classes=10']):
        in_this_process('analysis_tools/get_flops.py', config, '--shape', 320, 480, *options)
        out = capsys.readouterr().out
        # billions: 1000 proposals of 12544 numbers through layers of 1024; mebibytes
        assert re.search(r'bbox_head .* 1[34]\.\d{3} ', out) and re.search(r'estimate\): 1\d\d MiB', out)
        assert 'image 320 x 480' in out and 'backbone.stage4' in out and '1000 proposals' in out
        (total,) = (line.split() for line in out.splitlines() if line.startswith('total'))
        assert float(total[-1]) == pytest.approx(sum(map(float, total[2:5])), abs=0.002)
        totals.append(float(total[1]))
    assert totals[0] == pytest.approx(33.50, abs=0.01)
    assert totals[0] - totals[1] == pytest.approx(70 * 5 * 1025 / 1e6, abs=0.002)
