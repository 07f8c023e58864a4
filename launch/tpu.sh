#!/usr/bin/env bash
# A TPU slice as a queued resource, and the same command on each of its hosts. SHARE: an NFS export (Filestore) that holds prepared data and runs.
#   PROJECT=mine ZONE=us-west4-a SHARE=10.0.0.2:/share launch/tpu.sh
set -euo pipefail
: "${PROJECT:?}" "${ZONE:?}" "${SHARE:?}"
NAME=${NAME:-gpt2}
TYPE=${TYPE:-v5litepod-256}                # v5litepod-8 and v6e-8 are one host
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}    # v2-alpha-tpuv6e for v6e
REPOSITORY=${REPOSITORY:?the address of a clone of this repository}
where=(--project="$PROJECT" --zone="$ZONE")

gcloud compute tpus queued-resources create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$RUNTIME" "${where[@]}"
until [ "$(gcloud compute tpus queued-resources describe "$NAME" "${where[@]}" --format='value(state.state)')" = ACTIVE ]; do
  sleep 30
done

everywhere() {
  gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker=all --command="$1"
}
everywhere "sudo apt-get install -y nfs-common && sudo mkdir -p /share && sudo mount -t nfs $SHARE /share"
everywhere "curl -LsSf https://astral.sh/uv/install.sh | sh && git clone $REPOSITORY gpt2jax && cd gpt2jax && ~/.local/bin/uv venv --python 3.12 && ~/.local/bin/uv pip install -e '.[tpu]'"
# the hosts of a slice find each other; after a preemption the same line goes on
everywhere "cd gpt2jax && .venv/bin/python train.py configs/gpt2-124m.yaml configs/data/fineweb-edu.yaml configs/hardware/v5e-256.yaml --data.source=/share/fineweb-edu --run.dir=/share/runs/gpt2-124m --run.resume=auto"

echo "Hand it back: gcloud compute tpus queued-resources delete $NAME --force ${where[*]}"
