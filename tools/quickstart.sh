#!/usr/bin/env bash
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Set up, train and test a small detector: environment, data set, training, test, pictures.
#   bash tools/quickstart.sh [arguments of tools/setup_env.sh]
# A second run skips finished steps and resumes an interrupted training.
# Environment: DATA (default data/shapes_coco) and WORK_DIR (work_dirs/quickstart), relative to this checkout.
set -euo pipefail
unset CDPATH

cd "$(dirname "$0")/.."
for argument; do
    case $argument in -h | --help)
        sed -n '3,6s/^# //p' tools/quickstart.sh
        exec bash tools/setup_env.sh --help
        ;;
    esac
done
CONFIG=configs/mmdet/ravlt_shapes_quickstart.py
DATA=${DATA:-data/shapes_coco}
WORK_DIR=${WORK_DIR:-work_dirs/quickstart}
FOUND=$WORK_DIR/predictions.json
SHEET=$WORK_DIR/contact_sheet.png
METRICS=$WORK_DIR/metrics.json
LOG=$WORK_DIR/quickstart.log

# Shorter spinning: by default, waiting threads stall each other on cores shared with other programs.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-20000}
# glibc reuses the memory of large tensors: a quarter of the page faults
export MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=1073741824

step() { echo "== $*" >&2; }

# A step is done if its stamp holds its inputs. Another config or data set runs it and all later steps again.
is_done() { [ -f "$WORK_DIR/.$1.done" ] && [ "$(cat "$WORK_DIR/.$1.done")" = "$2" ]; }
done_with() { echo "$2" >"$WORK_DIR/.$1.done"; }
fingerprint() { cksum "$@" | cksum | cut -d' ' -f1; }

# A failure names the log; 130 and 143 are Ctrl-C and SIGTERM.
failed() { # STATUS WHAT
    case $1 in
        130 | 143)
            echo 'stopped. The same command goes on from the last checkpoint.' >&2
            exit "$1"
            ;;
    esac
    tail -n 20 "$LOG" >&2
    echo "error: $2 failed; the whole log is in $LOG" >&2
    exit 1
}
# Progress goes to the screen, all output to the log.
logged() { "$@" >>"$LOG" 2>&1 || failed $? "'$*'"; }

step '1/5 environment'
PY=$(bash tools/setup_env.sh "$@" | tail -n 1)
mkdir -p "$WORK_DIR"
started=$SECONDS

step "2/5 data set: $DATA"
# The tool keeps a data set with these settings and raises for a folder with other content.
logged "$PY" tools/make_shapes_dataset.py "$DATA" --format coco --num-train 716 --num-val 60

made_from=$(fingerprint "$CONFIG" "$DATA"/annotations/*.json)-$DATA
if is_done train "$made_from"; then
    step '3/5 training: done before'
else
    resume=()
    if is_done begin "$made_from"; then
        resume=(--resume)
    elif [ ! -e "$WORK_DIR/.begin.done" ] && ls "$WORK_DIR"/*.pth >/dev/null 2>&1; then
        echo "error: WORK_DIR = $WORK_DIR holds checkpoints of another run. Name another folder." >&2
        exit 1
    else # checkpoints of another config or data set
        rm -f "$WORK_DIR"/epoch_*.pth "$WORK_DIR"/last_checkpoint "$WORK_DIR"/.*.done
        done_with begin "$made_from"
    fi
    step "3/5 training, 425 iterations (some minutes; log: $LOG)"
    "$PY" tools/train.py "$CONFIG" --data-root "$DATA" --work-dir "$WORK_DIR" \
        --no-validate "${resume[@]}" 2>&1 | tee -a "$LOG" | { grep --line-buffered -E \
        'Epoch\(train\)|^(error|notice):' || true; } | sed -u -E 's/.*(Epoch.train.).*(\[[0-9]+\]\[ *[0-9]+\/[0-9]+\]).*(eta: [^ ]+).* (loss: [0-9.]+).*/   \2  \3  \4/' >&2 || failed $? 'the training'
    done_with train "$made_from"
fi

if is_done test "$made_from"; then
    step '4/5 test: done before'
else
    step '4/5 test on held-out pictures'
    logged "$PY" tools/test.py "$CONFIG" "$(cat "$WORK_DIR/last_checkpoint")" --data-root "$DATA" \
        --work-dir "$WORK_DIR" --save-json "$FOUND" --out "$METRICS" --out-item metrics
    done_with test "$made_from"
fi

if is_done sheet "$made_from" && [ -f "$SHEET" ]; then
    step '5/5 pictures: done before'
else
    step '5/5 pictures'
    logged "$PY" tools/analysis_tools/contact_sheet.py "$FOUND" "$SHEET" \
        --annotations "$DATA/annotations/instances_val2017.json" --images "$DATA/val2017"
    done_with sheet "$made_from"
fi

"$PY" - "$METRICS" "$SHEET" $((SECONDS - started)) <<'PY'
import json
import os
import sys

metrics, sheet, seconds = json.load(open(sys.argv[1])), os.path.abspath(sys.argv[2]), sys.argv[3]
names = ('mAP', 'mAP_50', 'mAP_75', 'mAP_s', 'mAP_m', 'mAP_l')
print('\n       ' + ''.join(f'{name.replace("mAP_", "AP ").replace("mAP", "AP"):>8}' for name in names))
for kind, label in (('bbox', 'boxes'), ('segm', 'masks')):
    values = [metrics.get(f'coco/{kind}_{name}', -1) for name in names]
    print(f'{label:7}' + ''.join(f'{value:8.3f}' if value >= 0 else f'{"-":>8}' for value in values))
print(f'\ntime after set-up: {seconds} s')
print(f'ground truth beside predictions: {sheet}')
goals = (('bbox', 0.8), ('segm', 0.75))
missed = [
    f'{kind} AP50 is {metrics.get(f"coco/{kind}_mAP_50", 0):.3f}, below {goal}'
    for kind, goal in goals
    if metrics.get(f'coco/{kind}_mAP_50', 0) < goal
]
if missed:
    sys.exit('MISSED: ' + '; '.join(missed))
print('OK: bbox AP50 >= 0.8 and mask AP50 >= 0.75')
PY
