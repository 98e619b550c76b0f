# Sourced by the scripts that build test programs from the C core.

# core_objects FOLDER COMMAND...: the core's objects in FOLDER, each made by COMMAND, all cores at work. They are
# kept as long as no source is newer and the command is the same, so several programs share them.
core_objects() {
    local folder=$1 newer
    shift
    mkdir -p "$folder"
    newer=$(find csrc -maxdepth 1 -name '*.[ch]' -newer "$folder/command" 2>/dev/null || echo all)
    if [ -z "$newer" ] && [ "$(cat "$folder/command")" = "$*" ]; then return; fi
    rm -f "$folder"/*.o "$folder/command"
    # shellcheck disable=SC2016
    printf '%s\n' csrc/*.c | xargs -P "$(nproc)" -I SOURCE bash -c \
        'source=$1; exec "${@:2}" -c "$source" -o "$0/$(basename "$source" .c).o"' "$folder" SOURCE "$@"
    echo "$*" > "$folder/command"
}
