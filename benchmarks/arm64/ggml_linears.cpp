// Multiplies rows by weights with llama.cpp's kernels, between marks.
//
//     ggml_linears FORMAT ROWS:OUTPUTS:INPUTS...
//
// Prints the bytes of each product's weights. They lie in the first buffer type of the CPU backend
// that multiplies them, as llama.cpp places them: so they are repacked where it would do so.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "mark.h"

namespace {

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "ggml_linears: %s\n", what.c_str());
  std::exit(1);
}

ggml_type find_type(const std::string& name) {
  for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_BF16})
    if (ggml_type_name(type) == name) return type;
  fail("there is no format " + name);
}

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, ggml_tensor* tensor) {
  ggml_backend_buffer_t buffer =
      ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, tensor));
  ggml_backend_tensor_alloc(buffer, tensor, ggml_backend_buffer_get_base(buffer));
  return buffer;
}

// Where llama.cpp would put the weights of `product`: an extra type if the backend then multiplies
// them.
void place_weights(ggml_backend_dev_t device, ggml_tensor* weights, ggml_tensor* product) {
  const auto extra_types = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
      ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                        "ggml_backend_dev_get_extra_bufts"));
  for (ggml_backend_buffer_type_t* type = extra_types(device); type != nullptr && *type; ++type) {
    ggml_backend_buffer_t buffer = allocate(*type, weights);
    if (ggml_backend_dev_supports_op(device, product)) return;
    ggml_backend_buffer_free(buffer);
    weights->buffer = nullptr;
    weights->data = nullptr;
    weights->extra = nullptr;
  }
  allocate(ggml_backend_cpu_buffer_type(), weights);
}

void multiply(ggml_backend_dev_t device, ggml_threadpool* threads, ggml_type type, int64_t M,
              int64_t N, int64_t K) {
  ggml_context* context = ggml_init({1 << 20, nullptr, true});
  ggml_tensor* weights = ggml_new_tensor_2d(context, type, K, N);
  ggml_tensor* x = ggml_new_tensor_2d(context, GGML_TYPE_F32, K, M);
  ggml_tensor* product = ggml_mul_mat(context, weights, x);
  place_weights(device, weights, product);
  allocate(ggml_backend_cpu_buffer_type(), x);
  allocate(ggml_backend_cpu_buffer_type(), product);
  const std::vector<uint8_t> bytes(ggml_nbytes(weights), 0x3c);
  ggml_backend_tensor_set(weights, bytes.data(), 0, bytes.size());
  ggml_set_f32(x, 0.5f);

  ggml_cgraph* graph = ggml_new_graph(context);
  ggml_build_forward_expand(graph, product);
  ggml_cplan plan = ggml_graph_plan(graph, 1, threads);
  std::vector<uint8_t> work(plan.work_size);
  plan.work_data = work.data();
  for (int i = 0; i < 2; ++i) {
    mark_begin();
    const ggml_status status = ggml_graph_compute(graph, &plan);
    mark_end();
    if (status != GGML_STATUS_SUCCESS) fail("the product fails");
  }
  std::printf("%zu\n", bytes.size());
  ggml_free(context);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) fail("give the format and shapes");
  const ggml_type type = find_type(argv[1]);
  ggml_backend_dev_t device = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
  ggml_threadpool_params one_thread = ggml_threadpool_params_default(1);
  ggml_threadpool* threads = ggml_threadpool_new(&one_thread);
  for (int i = 2; i < argc; ++i) {
    long M, N, K;
    if (std::sscanf(argv[i], "%ld:%ld:%ld", &M, &N, &K) != 3) fail("a shape is M:N:K");
    multiply(device, threads, type, M, N, K);
  }
}
