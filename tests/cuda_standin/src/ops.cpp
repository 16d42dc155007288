// torch's CUDA kernels, replaced: each operation waits for the current stream and runs torch's CPU kernel on the same
// memory. Loaded by the stand-in of libcudart at the first cudaMalloc; registered on the dispatch key CUDA, so that
// autograd's threads and DDP's reducer see it too.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

struct Pair {
  at::Tensor own, alias;
};
using Pairs = std::vector<Pair>;

at::Tensor aliased(const at::Tensor& t, Pairs& pairs) {
  if (!t.defined() || !t.is_cuda()) return t;
  for (const Pair& p : pairs)
    if (p.own.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return p.alias;
  at::Tensor made;
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) {
    made = at::empty_strided(t.sizes(), t.strides(), options);
  } else {
    at::Tensor keep = t;
    made = at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [keep](void*) {}, options, at::Device(at::kCPU));
  }
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  pairs.push_back({t, made});
  return made;
}

IValue in(const IValue& v, Pairs& pairs) {
  if (v.isTensor()) return aliased(v.toTensor(), pairs);
  if (v.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& t : v.toTensorVector()) all.push_back(aliased(t, pairs));
    return all;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector())
      all.push_back(t ? std::optional<at::Tensor>(aliased(*t, pairs)) : std::nullopt);
    return all;
  }
  return v;
}

void take(at::Tensor& to, const at::Tensor& from) {  // both dense with the same strides
  constexpr size_t kPiece = 256 << 10;  // glibc writes larger blocks past the caches, which takes three times as long
  size_t size = from.numel() * from.element_size();
  for (size_t at = 0; at < size; at += kPiece)
    memcpy((char*)to.data_ptr() + at, (char*)from.data_ptr() + at, std::min(kPiece, size - at));
}

at::Tensor moved(const at::Tensor& r, const Pairs& pairs, at::Device device) {
  if (!r.defined() || !r.is_cpu()) return r;
  for (const Pair& p : pairs)
    if (p.alias.unsafeGetTensorImpl() == r.unsafeGetTensorImpl()) return p.own;
  for (const Pair& p : pairs)
    if (r.numel() && p.alias.numel() && r.storage().data() == p.alias.storage().data())
      return at::as_strided(p.own, r.sizes(), r.strides(), p.own.storage_offset() + r.storage_offset());
  at::Tensor dense = r.is_non_overlapping_and_dense() ? r : r.contiguous();
  at::Tensor made = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(device).pinned_memory(false));
  take(made, dense);
  return made;
}

IValue out(const IValue& v, const Pairs& pairs, at::Device device) {
  if (v.isTensor()) return moved(v.toTensor(), pairs, device);
  if (v.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& t : v.toTensorVector()) all.push_back(moved(t, pairs, device));
    return all;
  }
  return v;
}

at::Generator generator(const std::optional<at::Generator>& given, at::Device device) {
  static std::mutex m;
  static auto* all = new std::map<c10::GeneratorImpl*, std::pair<uint64_t, at::Generator>>;
  at::Generator cuda = given ? *given : at::globalContext().defaultGenerator(device);
  if (cuda.device().is_cpu()) return cuda;
  std::lock_guard<std::mutex> l(m);
  uint64_t seed = cuda.current_seed();
  auto it = all->find(cuda.unsafeGetGeneratorImpl());
  if (it == all->end() || it->second.first != seed)
    it = all->insert_or_assign(cuda.unsafeGetGeneratorImpl(), std::make_pair(seed, at::detail::createCPUGenerator(seed))).first;
  return it->second.second;
}

void settle(at::Device device) {
  c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
}

// An operation that only changes its arguments, while the stream is busy: it is put onto the stream, as a kernel would be.
struct Later {
  c10::OperatorHandle op;
  Stack stack;
};
void run_later(void* data) {
  std::unique_ptr<Later> later((Later*)data);
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView guard;
  try {
    later->op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &later->stack);
  } catch (const std::exception& e) {
    fprintf(stderr, "fakecuda: %s failed on the stream: %s\n", later->op.operator_name().name.c_str(), e.what());
  }
}

bool only_changes(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  if (name.back() != '_') return false;
  for (const auto& r : op.schema().returns())
    if (!r.alias_info() || !r.alias_info()->isWrite()) return false;
  return true;
}

// The two that take longest where copies are compared: a CPU counts true elements slowly, and makes ranges in new memory.
bool quick(const c10::OperatorHandle& op, Stack* stack, size_t base) {
  const auto& [name, overload] = op.operator_name();
  if (name == "aten::sum" && overload == "dim_IntList") {
    at::Tensor from = (*stack)[base].toTensor();
    bool all = (*stack)[base + 1].isNone() || (*stack)[base + 1].toIntVector().empty();
    if (!from.is_cuda() || from.scalar_type() != at::kBool || !from.is_contiguous() || !all ||
        (*stack)[base + 2].toBool() || !(*stack)[base + 3].isNone())
      return false;
    settle(from.device());
    const auto* values = (const uint8_t*)from.data_ptr();
    int64_t count = 0;
    for (int64_t i = 0; i < from.numel(); i++) count += values[i];
    at::Tensor made = at::empty({}, from.options().dtype(at::kLong));
    *(int64_t*)made.data_ptr() = count;
    stack->resize(base);
    stack->push_back(made);
    return true;
  }
  if (name == "aten::arange" && overload == "start_out") {
    at::Tensor made = (*stack)[base + 3].toTensor();
    at::Scalar start = (*stack)[base].toScalar(), end = (*stack)[base + 1].toScalar(), step = (*stack)[base + 2].toScalar();
    if (made.scalar_type() != at::kInt || !start.isIntegral(false) || !end.isIntegral(false) || !step.isIntegral(false) ||
        step.toLong() != 1 || end.toLong() < start.toLong() || !made.is_contiguous())
      return false;
    settle(made.device());
    int64_t count = end.toLong() - start.toLong();
    made.resize_({count});
    auto* values = (int32_t*)made.data_ptr();
    for (int64_t i = 0; i < count; i++) values[i] = int32_t(start.toLong() + i);
    stack->resize(base);
    stack->push_back(made);
    return true;
  }
  return false;
}

void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  size_t n = arguments.size(), base = stack->size() - n;
  if (quick(op, stack, base)) return;
  at::AutoDispatchBelowADInplaceOrView guard;
  Pairs pairs;
  std::optional<at::Device> device;
  std::vector<IValue> changed(n);
  for (size_t i = 0; i < n; i++) changed[i] = in((*stack)[base + i], pairs);
  std::set<int> indices;
  for (const Pair& p : pairs) indices.insert(p.own.device().index());
  if (!pairs.empty()) device = pairs.front().own.device();
  for (size_t i = 0; i < n; i++) {
    if (!changed[i].isDevice()) continue;
    at::Device d = changed[i].toDevice();
    if (!device) device = d.has_index() ? d : at::Device(at::kCUDA, c10::cuda::current_device());
    if (d.is_cuda()) changed[i] = at::Device(at::kCPU);
  }
  if (!device) device = at::Device(at::kCUDA, c10::cuda::current_device());
  for (size_t i = 0; i < n; i++) {
    auto type = arguments[i].type();
    if (type->kind() == c10::TypeKind::OptionalType) type = type->expectRef<c10::OptionalType>().getElementType();
    if (type->kind() != c10::TypeKind::GeneratorType) continue;
    changed[i] = generator(changed[i].isNone() ? std::nullopt : std::optional(changed[i].toGenerator()), *device);
  }
  if (indices.empty()) indices.insert(device->index());
  if (indices.size() == 1 && only_changes(op)) {
    auto stream = c10::cuda::getCurrentCUDAStream(*indices.begin());
    if (!stream.query()) {
      std::vector<IValue> own(stack->begin() + base, stack->end());
      stack->resize(base);
      for (size_t i = 0; i < op.schema().returns().size(); i++) stack->push_back(own[i]);
      auto* later = new Later{op, {}};
      for (IValue& v : changed) later->stack.push_back(std::move(v));
      C10_CUDA_CHECK(cudaLaunchHostFunc(stream.stream(), run_later, later));
      return;
    }
  }
  for (int index : indices) settle(at::Device(at::kCUDA, index));
  stack->resize(base);
  for (IValue& v : changed) stack->push_back(std::move(v));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (Pair& p : pairs) {
    bool same = p.alias.sizes() == p.own.sizes();
    if (same && (p.own.numel() == 0 || p.alias.data_ptr() == p.own.data_ptr())) continue;
    if (!same) {
      p.own.resize_(p.alias.sizes());
      if (p.alias.is_non_overlapping_and_dense() && p.alias.strides() != p.own.strides())
        p.own.as_strided_(p.alias.sizes(), p.alias.strides());
    }
    at::Tensor dense = p.alias.strides() == p.own.strides() ? p.alias : p.alias.contiguous();
    take(p.own, dense);
  }
  for (size_t i = base; i < stack->size(); i++) (*stack)[i] = out((*stack)[i], pairs, *device);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  bool both = self.is_cuda() && from.is_cuda();
  bool eligible = self.scalar_type() == from.scalar_type() && self.sizes() == from.sizes() && self.is_conj() == from.is_conj() &&
                  self.is_neg() == from.is_neg() &&
                  ((self.is_contiguous() && from.is_contiguous()) ||
                   (self.strides() == from.strides() && self.is_non_overlapping_and_dense()));
  if (!both || eligible || self.numel() == 0) return at::native::copy_(self, from, non_blocking);
  settle(self.device());
  settle(from.device());
  Pairs pairs;
  at::Tensor there = aliased(self, pairs), here = aliased(from, pairs);
  at::native::copy_(there, here, false);
  return self;
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Those that make memory or views of it, and those that a CPU has not.
const std::set<std::string>& kept() {
  static const std::set<std::string> all{
      "aten::empty", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold",
      "aten::set_", "aten::resize_", "aten::record_stream", "aten::is_set_to", "aten::view_as_real", "aten::view_as_complex",
      "aten::_pin_memory", "aten::is_pinned", "aten::_efficientzerotensor", "aten::copy_", "aten::_copy_from",
      "aten::_has_same_storage_numel", "aten::_fused_sdp_choice", "aten::as_strided_", "aten::alias", "aten::detach"};
  return all;
}

std::unique_ptr<torch::Library> g_library;

struct Registered {
  Registered() {
    Silent silent;
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    g_library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    std::set<std::string> also{"aten::convolution", "aten::convolution_overrideable", "aten::convolution_backward"};
    int count = 0;
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0 || kept().count(name.name)) continue;
      auto op = dispatcher.findSchema(name);
      if (!op || !(op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || also.count(name.name))) continue;
      bool view = false;
      for (const auto& argument : op->schema().arguments())
        if (argument.alias_info() && !argument.alias_info()->isWrite()) view = true;
      if (view) continue;
      std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
      g_library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
      count++;
    }
    g_library->impl("copy_", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(copy_)));
    at::globalContext().setUserEnabledCuDNN(false);
    if (getenv("FAKECUDA_LOG")) fprintf(stderr, "fakecuda: %d operations run on the CPU\n", count);
  }
} registered;

}  // namespace
