#!/bin/sh
# build.sh SITE_PACKAGES CRT_INCLUDE OUT [cudart|cupti|nccl|ops]: the CUDA stand-in, all of it or one part.
# SITE_PACKAGES holds torch (CUDA wheel) and nvidia/...; CRT_INCLUDE the headers of nvidia-cuda-crt.
# What the real libraries export and a stand-in does not have says "not supported".
set -e
src=$(cd "$(dirname "$0")" && pwd)/src; site=$1; out=$3; what=${4:-cudart cupti nccl ops}
inc="-I$site/nvidia/cu13/include -I$2"
mkdir -p "$out"; cd "$out"

missing() { # missing REAL_LIBRARY PATTERN OBJECTS...: functions of the library that the objects do not define
    nm -D --defined-only "$1" | awk '$2~"[TWi]"{sub(/@.*/,"",$3); print $3}' | grep "^$2" | sort -u > "want.$2"; pattern=$2; shift 2
    nm --defined-only "$@" | awk '$2~"[TW]"{print $3}' | sort -u > "have.$pattern"
    comm -23 "want.$pattern" "have.$pattern"
}

cudart() {
    for part in device copies memory stream code; do
        g++ -std=c++17 -O2 -fPIC -fvisibility=hidden -Wall $inc -c "$src/$part.cpp" -o "$part.o"
    done
    { echo 'int fakecuda_unsupported(const char*, char*);'
      missing "$site/nvidia/cu13/lib/libcudart.so.13" "" device.o copies.o memory.o stream.o code.o | while read -r n; do
          echo "__attribute__((visibility(\"default\"))) int $n(void) { static char told; return fakecuda_unsupported(\"$n\", &told); }"
      done; } > stubs.c
    gcc -O1 -fPIC -fno-builtin -w -c stubs.c -o stubs.o
    echo 'libcudart.so.13 { global: cuda*; __cuda*; fakecuda_*; local: *; };' > cudart.map
    g++ -shared -Wl,-soname,libcudart.so.13 -Wl,--version-script=cudart.map -static-libstdc++ -static-libgcc \
        -o libcudart.so.13 device.o copies.o memory.o stream.o code.o stubs.o -ldl -lpthread -lrt
    gcc -O1 -fPIC -shared -Wall -Wl,-soname,libcuda.so.1 -o libcuda.so.1 "$src/cuda.c" -L. -l:libcudart.so.13 -Wl,-rpath,'$ORIGIN'
}

cupti() {
    gcc -O1 -fPIC -Wall -c "$src/cupti.c" -o cupti.o
    missing "$site/nvidia/cu13/lib/libcupti.so.13" cupti cupti.o | sed 's/.*/int &(void) { return 27; }/' > stubs.cupti.c
    gcc -O1 -fPIC -w -shared -Wl,-soname,libcupti.so.13 -o libcupti.so.13 cupti.o stubs.cupti.c
}

nccl() {
    for part in nccl nccl_collectives nccl_log nccl_ras; do
        g++ -std=c++17 -O3 -fPIC -fvisibility=hidden -Wall $inc "-I$site/nvidia/nccl/include" -c "$src/$part.cpp" -o "$part.o"
    done
    missing "$site/nvidia/nccl/lib/libnccl.so.2" nccl nccl.o | sed 's/.*/int &(void) { return 5; }/' > stubs.nccl.c
    gcc -O1 -fPIC -w -c stubs.nccl.c -o stubs.nccl.o
    g++ -shared -Wl,-soname,libnccl.so.2 -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL -o libnccl.so.2 \
        nccl.o nccl_collectives.o nccl_log.o nccl_ras.o stubs.nccl.o -L. -l:libcudart.so.13 -lpthread -lrt
}

ops() {
    g++ -std=c++20 -O3 -fPIC -shared -w $inc "-I$site/torch/include" "-I$site/torch/include/torch/csrc/api/include" \
        -o libfakeops.so "$src/ops.cpp" "-L$site/torch/lib" -lc10 -ltorch_cpu -lc10_cuda -L. -l:libcudart.so.13
}

for part in $what; do "$part"; done
