#!/bin/bash
# A bash job: background jobs, a pipeline with data in flight, a here-document, a trap and variables; all go on.
exec 9>>log
echo started >&9

fail() {
    echo "fail: $1" | tee /dev/fd/9 >&2
    kill $(jobs -p) 2>/dev/null
    exit 1
}

await_go() {
    for ((i = 0; i < 6000; i++)); do
        [[ -e go ]] && return 0
        sleep 0.01
    done
    return 1
}

trapped=0
trap 'trapped=$((trapped + 1))' USR1
declare -A state=([colour]=green [count]=3)
mkfifo lines

# A background job that ends with a code of its own, one that is a pipeline, and one to be killed.
(await_go && exit 7) &
coded=$!
(
    for ((n = 0; n < 500; n++)); do echo "line $n"; done
    await_go
    echo last
) | sed 's/^/> /' | sort >sorted &
pipeline=$!
sleep 1000 &
sleeper=$!
exec 3< <(echo one && await_go && echo two)
read -r first <&3
exec 4<<<"here $first"
kill -USR1 $$

: >ready.tmp && mv ready.tmp ready
await_go || fail "no go"

[[ $trapped == 1 ]] || fail "trap ran $trapped times before"
kill -USR1 $$
[[ $trapped == 2 ]] || fail "trap ran $trapped times"
[[ ${state[colour]}-${state[count]} == green-3 ]] || fail "variables"
read -r second <&3
[[ $first-$second == one-two ]] || fail "process substitution: $first-$second"
read -r here <&4
[[ $here == "here one" ]] || fail "here-document: $here"
[[ $(jobs -rp | wc -l) -ge 1 ]] || fail "no running jobs"
wait "$coded"
[[ $? == 7 ]] || fail "exit code of the background job"
wait "$pipeline" || fail "pipeline"
[[ $(wc -l <sorted) == 501 && $(head -n 1 sorted) == "> last" ]] || fail "output of the pipeline"
kill "$sleeper"
wait "$sleeper" 2>/dev/null
[[ $? == 143 ]] || fail "exit code of the killed job"
echo pass >&9
echo pass
