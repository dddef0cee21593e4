#!/usr/bin/env bash
# `gpu.py` on a GPU machine that reaches no network, keeps its files while it is warm, and takes 64 MiB with each command.
#
#   gpu_session.sh stage          here, once: Warp in two parts, 0.5.0, what tests need, results of the CPU, in .gpu
#   gpu_session.sh part N         there, with .gpu/pN alone (N = 0), without long pauses: keep it
#   gpu_session.sh go [OPTION..]  there, with the last part, .gpu/wheels, .gpu/peer and .gpu/references: install, run
#
# Results go to the folder $OUT (gpu-results), with the kernels that were compiled (kernels.tar.gz): unpacked here as
# .gpu/cache they save another machine of the kind their compilation. PYTHON (python3) has torch with CUDA there, and may
# be another one here.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
kept=${TMPDIR:-/tmp}/nvalchemiops-gpu
fetch() { # FOLDER PACKAGE...
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 -d "$@"
}
case ${1:-} in
stage)
  mkdir -p .gpu/wheels
  fetch .gpu/warp -c constraints.txt warp-lang
  "$python" -m zipfile -e .gpu/warp/*.whl .gpu/warp/site
  rm -r .gpu/warp/site/warp/tests .gpu/warp/site/warp/examples
  tar -C .gpu/warp/site -cf - . | xz -9 | split -b 56m -d -a 1 - .gpu/p  # a third smaller than the wheel
  rm -r .gpu/warp
  fetch .gpu/peer nvalchemi-toolkit-ops==0.5.0
  fetch .gpu/wheels -c constraints.txt ase tad-dftd3 tad-mctc
  export PYTHONPATH=$PWD
  "$python" benchmarks/gpu.py --stand-in --minutes 60 --only checks --references .gpu/references --json .gpu/checks.json
  du -sh .gpu/*
  ;;
part)
  mkdir -p "$kept"
  cp ".gpu/p$2" "$kept/"
  ;;
go)
  shift
  mkdir -p "$kept" "${OUT:=gpu-results}"
  cp .gpu/p? "$kept/"
  mkdir -p "$kept/site"
  cat "$kept"/p? > "$kept/warp.tar.xz"
  "$python" -m tarfile -e "$kept/warp.tar.xz" "$kept/site"
  if [ -d .gpu/cache ]; then cp -r .gpu/cache "$kept/"; fi
  for wheel in .gpu/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$kept/site"; done
  for wheel in .gpu/peer/*.whl; do "$python" -m zipfile -e "$wheel" "$kept/peer"; done
  export PYTHONPATH="$kept/site:$PWD" WARP_CACHE_PATH="$kept/cache"
  "$python" benchmarks/gpu.py --peer "$kept/peer" --references .gpu/references --json "$OUT/gpu.json" "$@" || status=$?
  tar -C "$kept" --exclude='*.cu' -czf "$OUT/kernels.tar.gz" cache  # also of a run that was interrupted
  exit "${status:-0}"
  ;;
*)
  sed -n '2,10p' "$0"
  exit 2
  ;;
esac
