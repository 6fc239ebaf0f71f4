// C functions over llama.cpp's encoder of images, whose own interface is C++.
//
// Compiled by llama_cpp.py against llama.cpp's sources, and linked with its libmtmd.
#include <cstring>

#include "clip-impl.h"
#include "clip.h"

extern "C" {

// The encoder in a file; null if it can't be read.
void* shim_open(const char* path) {
  clip_context_params params{};
  params.use_gpu = false;
  params.flash_attn_type = CLIP_FLASH_ATTN_TYPE_AUTO;
  params.image_min_tokens = params.image_max_tokens = -1;
  params.warmup = false;
  return clip_init(path, params).ctx_v;
}

// pixels: [height, width, 3], normalized -> num_values floats in out. Returns their true number, and
// writes nothing if it is another one; 0 for a failure.
long shim_encode(void* context, int num_threads, int width, int height, const float* pixels,
                 float* out, long num_values) {
  clip_image_f32 image;
  image.set_size({width, height}, false, false);
  image.cpy_buf(std::vector<float>(pixels, pixels + 3L * width * height));
  auto* const clip = static_cast<clip_ctx*>(context);
  std::vector<float> found(size_t(clip_n_output_tokens(clip, &image)) * clip_n_mmproj_embd(clip));
  if (long(found.size()) != num_values) return long(found.size());
  if (!clip_image_encode(clip, num_threads, &image, found)) return 0;
  std::memcpy(out, found.data(), found.size() * sizeof(float));
  return num_values;
}

void shim_close(void* context) { clip_free(static_cast<clip_ctx*>(context)); }
}
