#!/usr/bin/env bash
# The first hour on a machine with a GPU: what was never run on one, in the order in which a failure tells most.
#
#     tests/gpu_first_hour.sh [FOLDER]
#
# FOLDER gets a file for each part and a summary. Each part has a limit of time and goes on without the others.
# Without a GPU each part says why it is skipped, and the script ends with the status 3.
#
#     PYTHON   the interpreter in which spdl_media's packages are installed (python)
#     PHOTOS   a folder of JPEGs for the benchmark; without it pictures are made
#     VIDEO    a video for the benchmark; without it one is made
#     SECONDS_A_CELL, ROUNDS   of the benchmark (2 and 3)
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=${PYTHON:-python}
folder=${1:-gpu-first-hour-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONFAULTHANDLER=1
: > "$folder/summary.txt"
skipped=0 failed=0

say() { echo "$@" | tee -a "$folder/summary.txt"; }

# part NAME LIMIT COMMAND...: runs a part for at most so many seconds, and says how it ended.
part() {
    local name=$1 limit=$2 begin=$SECONDS code word
    shift 2
    timeout --kill-after=20 "$limit" "$@" > "$folder/$name.txt" 2>&1
    code=$?
    case $code in
        0) word=done ;;
        3) word=skipped; skipped=$((skipped + 1)) ;;
        124 | 137) word="cut off after $limit s"; failed=$((failed + 1)) ;;
        *) word="failed with $code"; failed=$((failed + 1)) ;;
    esac
    local last
    last=$(grep -m 1 '^no GPU can be used' "$folder/$name.txt" || tail -n 1 "$folder/$name.txt")
    say "$(printf '%-14s %-18s %5d s  %s' "$name" "$word" $((SECONDS - begin)) "$last")"
    return $code
}

ours=tests/gpu_first_hour.py
# Without a device the benchmark is asked once why it measures nothing.
part capabilities 120 "$python" $ours capabilities && all="1 2 4 8 16" || all=1
part tests 1200 "$python" $ours tests
part exits 600 "$python" $ours exits
part nvdec 600 "$python" $ours nvdec
part clips 300 "$python" $ours clips
part jpeg 600 "$python" $ours jpeg
[[ ${PHOTOS:-} && ${VIDEO:-} ]] || "$python" $ours media "$folder/media" > "$folder/media.txt" 2>&1
for threads in $all; do
    part "bench-$threads" 600 "$python" samples/benchmarks/gpu.py --counting --threads "$threads" \
        --images "${PHOTOS:-$folder/media}" --video "${VIDEO:-$folder/media/clip.mp4}" \
        --seconds "${SECONDS_A_CELL:-2}" --rounds "${ROUNDS:-3}" --json "$folder/bench-$threads.json"
done

say
say "Look at, in $folder:"
say "  capabilities.txt  is everything there that the parts need? nvidia-smi stands below"
say "  tests.txt         a failure here comes first; what was skipped says which package is missing"
say "  exits.txt         every status is to be 0: 134 is a process that aborted, 124 one that hangs"
say "  nvdec.txt         differences: 2 at most; film grain in the mean; a full device is to be a TransferError"
say "  clips.txt         kept decoders are to save tens of ms a clip; a busy stream of PyTorch is not to delay frames"
say "  jpeg.txt          which share for the JPEG engine is best (0.65 is DALI's), how many threads gain, and"
say "                    whether memory grows from batch to batch"
say "  bench-*.txt       does each way grow with the threads, and what is left to Python beside it? The facts"
say "                    that docs/gpu.md and docs/benchmarks.md may state then are in bench-*.json"
say "$failed failed, $skipped skipped"
[[ $failed == 0 ]] || exit 1
[[ $skipped == 0 ]] || exit 3
