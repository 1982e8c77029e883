# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/get_flops.py: its table and its options."""

import re

import pytest
from helpers.tool_runs import ROOT, in_this_process


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
