#!/usr/bin/env bash
# `gpu.py` on a GPU machine that reaches no network, keeps its files while it is warm, and takes 64 MiB with each command.
#
#   gpu_session.sh stage          here, once: Warp in two parts, 0.5.0, what tests need, compiled kernels, results of
#                                 the CPU, and versions of the library with each patch in gpu_variants, in .gpu
#   gpu_session.sh copy PATCH     here, after that, for each other version to be timed beside ours: a copy of the library
#                                 with the changes of a file NAME.patch
#   gpu_session.sh part N         there, with .gpu/pN alone (N = 0), without long pauses: keep it
#   gpu_session.sh go [OPTION..]  there, with the last part, .gpu/{wheels,peer,cache.tar.xz,references} and
#                                 .gpu/copies: install, run
#
# Results go to the folder $OUT (gpu-results). PYTHON (python3) has torch with CUDA there, and may be another one here.
# The kernels are compiled for an H100, or for CAPABILITY. Two calls do: the first with part 0, the second, within half a
# minute, with all else: it takes nine of the ten minutes that a call may last.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
kept=${TMPDIR:-/tmp}/nvalchemiops-gpu
fetch() { # FOLDER PACKAGE...
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 -d "$@"
}
compile() { # PACKAGE; without -P it would be that in this folder
  PYTHONPATH=$1 WARP_CACHE_PATH=$PWD/.gpu/cache "$python" -P -c "
import sys
from nvalchemiops.kernels.mesh import splines
splines.COMMON += ((4, 'float32'), (6, 'float32'), (6, 'float64'))  # which gpu_calls.py tries, too
from nvalchemiops.cli import main
sys.exit(main(['warmup', '--compute-capability', '${CAPABILITY:-9.0}']))"
  find .gpu/cache -name '*.cu' -delete
  tar -C .gpu -cf - cache | xz > .gpu/cache.tar.xz  # a tenth
}
case ${1:-} in
stage)
  mkdir -p .gpu/wheels
  fetch .gpu/warp -c constraints.txt warp-lang
  "$python" -m zipfile -e .gpu/warp/*.whl .gpu/warp/site
  rm -r .gpu/warp/site/warp/tests .gpu/warp/site/warp/examples
  tar -C .gpu/warp/site -cf - . | xz -9 | split -b 54m -d -a 1 - .gpu/p  # a third smaller than the wheel
  rm -r .gpu/warp
  fetch .gpu/peer nvalchemi-toolkit-ops==0.5.0
  fetch .gpu/wheels -c constraints.txt ase tad-dftd3 tad-mctc
  rm -rf .gpu/cache .gpu/copies
  compile "$PWD"
  PYTHONPATH=$PWD "$python" benchmarks/gpu.py --stand-in --minutes 60 --only checks --references .gpu/references --json .gpu/checks.json
  for patch in benchmarks/gpu_variants/*.patch; do bash benchmarks/gpu_session.sh copy "$patch"; done
  du -sh .gpu/*
  carried() { { git ls-files -z | xargs -0 cat; find "$@" -type f -exec cat {} +; } | wc -c; }
  echo "MiB of the two calls, at most 64: $(($(carried .gpu/p0) / 1048576 + 1))," \
    "$(($(carried .gpu/p1 .gpu/wheels .gpu/peer .gpu/cache.tar.xz .gpu/references .gpu/copies) / 1048576 + 1))"
  ;;
copy)
  folder=.gpu/copies/$(basename "$2" .patch)
  rm -rf "$folder"
  mkdir -p "$folder"
  cp -r nvalchemiops "$folder/"
  find "$folder" -name __pycache__ -exec rm -r {} +
  git apply --directory="$folder" "$2"
  compile "$PWD/$folder"
  # the files that differ travel
  find nvalchemiops -type f | while read -r file; do if cmp -s "$file" "$folder/$file"; then rm "$folder/$file"; fi; done
  find "$folder" -name __pycache__ -exec rm -r {} +
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
  if [ -f .gpu/cache.tar.xz ]; then "$python" -m tarfile -e .gpu/cache.tar.xz "$kept"; fi
  for wheel in .gpu/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$kept/site"; done
  for wheel in .gpu/peer/*.whl; do "$python" -m zipfile -e "$wheel" "$kept/peer"; done
  export PYTHONPATH="$kept/site:$PWD" WARP_CACHE_PATH="$kept/cache"
  for changed in .gpu/copies/*/nvalchemiops; do
    [ -d "$changed" ] || continue
    copy=$kept/copies/$(basename "$(dirname "$changed")")
    mkdir -p "$copy"
    cp -r nvalchemiops "$copy/"
    cp -r "$changed" "$copy/"
  done
  if compgen -G "$kept/copies/*" > /dev/null; then set -- --copies "$kept"/copies/* "$@"; fi
  "$python" benchmarks/gpu.py --minutes 8.5 --peer "$kept/peer" --references .gpu/references --json "$OUT/gpu.json" "$@"
  ;;
*)
  sed -n '2,15p' "$0"
  exit 2
  ;;
esac
