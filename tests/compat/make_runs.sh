#!/bin/sh
# Makes every run folder of these fixtures: make_runs.sh SRC PYTHON, started in an empty folder with a neutral path.
# SRC: src/ of a checkout of the version that is to write them; PYTHON: an interpreter with its dependencies.
set -eu
export PYTHONPATH="$1" OMP_NUM_THREADS=1
python="$2"

launch=command
oneround() { $launch "$python" -m oneround.cli "$@"; }
small() { # method, folder, further options: digits, three clients, a narrow network
    method="$1" folder="$2"
    shift 2
    oneround run "$method" --data digits --clients 3 --alpha 0.5 --seed 1 --device cpu --out "runs/$folder" \
        --set "$narrow" --set training.batch_size=16 --set "training.augment.crop_scale=[0.6, 1.0]" "$@"
}
rounds() { # the same over three rounds of one epoch, at a constant rate
    small "$@" --epochs 1 --set rounds=3 --set training.schedule=constant --set "training.milestones=[]"
}
narrow="model.encoder={kind: cnn, width: 2}" # 8 features
wide="model.encoder={kind: cnn, width: 4}"   # 16 features: ETF anchors of 10 classes need at least 9
features="sums.features={kind: patches, size: 48, patch: 4}"
two="fusion=[iffi, average]"
anchors="--set alignment.anchors=random" untraced="--set trace.every=0" # words, not to be quoted
merge="fusion=[{kind: mergenet, teacher: {encoder: {kind: cnn, width: 4}, epochs: 1}, \
adapter: {width: 4, heads: 2, layers: 1}}, average]"

small fafi fp32 --epochs 2 --set snapshots=1 --set trace.every=20 --set "fusion=[typicality-gated, iffi, average, \
logit-ensemble, informative-iffi, entropy-gated, aligned-iffi, dynamic-prototypes, feature-vote, split]"
small fafi int8 --epochs 1 --set upload.encoding=int8 --set "fusion=[entropy-gated, iffi, average]"
small fafi noisy-counts --epochs 1 --set upload.encoding=fp16 \
    --set "reveal.class_counts={epsilon: 1}" --set "$two"
small ridge sums --set "$features"
small routed routed --epochs 1 --set "$features"
small ridge masked --set "$features" --set sums.secure=true --set reveal.class_counts=false
rounds fedavg rounds
rounds mergenet mergenet --set "$merge"
small v9 v9 --epochs 2 --set "$wide" --set snapshots=1 --set trace.every=20 --set "$two"
small v10 v10 --epochs 3 --set snapshots=2 $anchors --set "$two"
small v11 consensus --epochs 2 --set snapshots=1 --set alignment.schedule=consensus $anchors $untraced --set "$two"
small bank bank --epochs 1 --set bank.size=64 --set bank.teacher_epochs=1 $untraced --set "$two"
status=0 # λ explodes at one client and its safeguard ends the run, which is an error
small etf-decoupled rails --epochs 4 --set "$wide" --set snapshots=2 --set alignment.weight.rate=2 \
    --set rails.largest_weight=20 --set rails.on_explosion=stop $untraced --set "$two" || status=$?
[ "$status" = 1 ]

oneround demo --partitions 2 --out runs/study --set local.device=cpu --set partition.clients=3 \
    --set partition.alpha=0.3 --set "$narrow" --set training.batch_size=16 --set training.epochs=2 --set snapshots=1 \
    $untraced --set "$two"
oneround sweep fafi fafi+balanced --alpha 0.5 --partitions 1-2 --data digits --device cpu --out runs/sweep \
    --set "$narrow" --set partition.clients=3 --set training.batch_size=16 --set training.epochs=2 $untraced \
    --set "$two"
oneround compare runs/sweep --keep runs/sweep.json
oneround federate local fafi --data digits --clients 3 --alpha 0.5 --epochs 1 --seed 1 --device cpu \
    --out runs/federation --set "$narrow" --set training.batch_size=16 --set "fusion=[typicality-gated, iffi]"

# Killed: `unfinished` between two snapshots, when one client has ended and the next is on its way; `unfinished-rounds`
# in the last of three rounds. `undisturbed` and `mergenet` are the same runs left alone.
long() {
    small v9 "$1" --epochs 6 --set snapshots=3 --set local.checkpoint_seconds=0 --set local.workers=1 \
        --set training.restart_optimizer=false $anchors $untraced --set "fusion=[typicality-gated, iffi, average]"
}
newer() { find "runs/$1" -name "$2" -newer "$3" 2>/dev/null || true; }
killed() { # process, run: it had no time to write its result
    kill -KILL "$1"
    wait || true
    [ ! -e "runs/$2/result.json" ]
}
long undisturbed
(launch=exec && long unfinished) &
upload=""
until [ -n "$upload" ] && [ -n "$(newer unfinished state.safetensors "$upload")" ]; do
    sleep 0.01
    upload="$(newer unfinished "client_*.safetensors" runs/unfinished/metrics.jsonl)"
done
killed $! unfinished
(launch=exec && rounds mergenet unfinished-rounds --set local.workers=1 --set "$merge") &
until grep -qs '"snapshot", "epoch": 2' runs/unfinished-rounds/metrics.jsonl &&
    [ -n "$(newer unfinished-rounds "client_*.safetensors" runs/unfinished-rounds/metrics.jsonl)" ]; do
    sleep 0.01
done
killed $! unfinished-rounds

# What is only heavy and not needed to read a run: pictures, Flower's own files, the adapter of a finished run, copies.
find runs -name "*.png" -delete
find runs -name flower -prune -exec rm -r {} +
rm -r runs/federation/sites/client_001 runs/federation/sites/client_002 runs/mergenet/server/*/adapter_*
rm -r runs/sweep/*/*/model runs/consensus/model runs/bank/model
