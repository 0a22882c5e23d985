// A device that is none: PyTorch's PrivateUse1 backend over ordinary memory, computed by the CPU.
//
// It is as strict as a GPU: an operation on one of its tensors and one of the CPU's raises, but for
// numbers (tensors without dimensions) and indices, which a GPU takes from the CPU too. It may lack
// float64, as Apple's devices do, and have little memory. Fresh memory holds NaN.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);

// --- What a test sets, and what it may ask.
std::atomic<bool> has_float64{true};
std::atomic<int64_t> most_bytes{0};  // 0: as many as there are
std::atomic<int64_t> used_bytes{0};
std::atomic<int64_t> peak_bytes{0};
std::atomic<int64_t> emptied{0};
std::atomic<int64_t> operations{0};

// --- Memory.
struct Block {
  void* start;
  int64_t size;
};

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  used_bytes -= block->size;
  c10::free_cpu(block->start);
  delete block;
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) {
      return {nullptr, DEVICE};
    }
    const auto wanted = static_cast<int64_t>(size);
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        most_bytes == 0 || used_bytes + wanted <= most_bytes,
        "the pretend device is out of memory: ", wanted, " bytes asked for, ",
        used_bytes.load(), " of ", most_bytes.load(), " are used");
    void* start = c10::alloc_cpu(size);
    std::memset(start, 0xFF, size);  // NaN in every type of numbers
    used_bytes += wanted;
    if (used_bytes > peak_bytes) {
      peak_bytes = used_bytes.load();
    }
    return {start, new Block{start, wanted}, &give_back, DEVICE};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { emptied += 1; }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};
Memory memory;

// Memory of the CPU that the device reads fast: here ordinary memory, of which a list is kept.
std::mutex pinned_lock;
std::set<const void*> pinned;

void unpin(void* start) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(start);
  }
  c10::free_cpu(start);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = c10::alloc_cpu(size);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.insert(start);
    return {start, start, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};
PinnedMemory pinned_memory;

// --- Random numbers: the CPU's.
struct PretendGenerator final : at::CPUGeneratorImpl {
  PretendGenerator() : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = DEVICE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

// --- What PyTorch asks of a device.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::Stream only() const { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return only(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* start) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    return pinned.count(start) > 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<PretendGenerator>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = memory.allocate(size);
    const auto kept = std::min(storage.nbytes(), size);
    if (kept > 0) {
      std::memcpy(fresh.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// --- Operations that are the device's own: making, viewing and copying.
c10::ScalarType type_here(std::optional<at::ScalarType> asked) {
  const auto type = c10::dtype_or_default(asked);
  TORCH_CHECK_TYPE(
      has_float64 || (type != at::kDouble && type != at::kComplexDouble),
      "the pretend device has no float64, as Apple's devices have none; use float32, or the CPU");
  return type;
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> type,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, type_here(type), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> type,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, type_here(type));
}

// The same bytes as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) {
    return tensor;
  }
  return at::from_blob(
      tensor.storage().mutable_data(),
      tensor.sizes(),
      tensor.strides(),
      tensor.storage_offset(),
      [kept = tensor.storage()](void*) {},
      tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar number(const at::Tensor& tensor) {
  return on_cpu(tensor).item();
}

const at::Tensor& resize(
    const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& tensor,
    at::Storage storage,
    c10::SymInt offset,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* own = tensor.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(storage));
  own->set_storage_offset(offset.expect_int());
  own->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return tensor;
}

// --- Every other operation: looked at, then computed by the CPU.
void refuse_strangers(const c10::OperatorHandle& op, const at::Tensor& tensor, bool index) {
  if (!tensor.defined() || tensor.device() == DEVICE || tensor.dim() == 0 || index) {
    return;
  }
  TORCH_CHECK(
      false,
      "Expected all tensors to be on the same device, but found at least two devices, ",
      DEVICE, " and ", tensor.device(), "! (", op.schema().name(), ")");
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  operations += 1;
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  const auto& name = schema.name();
  const bool indexes = name == "aten::index" || name.rfind("aten::index_put", 0) == 0 ||
      name == "aten::_index_put_impl_";
  std::optional<at::Generator> asked;
  std::optional<at::Generator> drawn;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    const bool index = indexes && schema.arguments()[i].name() == "indices";
    if (value.isTensor()) {
      refuse_strangers(op, value.toTensor(), index);
    } else if (value.isTensorList()) {
      for (const auto& tensor : value.toTensorVector()) {
        refuse_strangers(op, tensor, index);
      }
    } else if (value.isList()) {
      for (const auto& element : value.toListRef()) {
        if (element.isTensor()) {
          refuse_strangers(op, element.toTensor(), index);
        }
      }
    } else if (value.isGenerator()) {
      // The CPU draws from a generator of its own alone: it goes on where this one is.
      asked = value.toGenerator();
      TORCH_CHECK(
          asked->device() == DEVICE,
          "Expected a '", DEVICE, "' device type for generator but found '", asked->device(), "'");
      drawn = at::detail::createCPUGenerator();
      drawn->set_state(asked->get_state());
      value = *drawn;
    }
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  if (asked) {
    asked->set_state(drawn->get_state());
  }
}

// --- Attention and convolutions, which PyTorch wants of a device as a whole. The CPU's, too.
at::Tensor there(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.to(DEVICE) : tensor;
}

std::optional<at::Tensor> on_cpu(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional(on_cpu(*tensor)) : std::nullopt;
}

int64_t attention_kind(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    std::optional<double> scale,
    bool grouped) {
  // What the CPU would choose depends on whether there will be a gradient.
  auto like = [](const at::Tensor& tensor) {
    return on_cpu(tensor.detach()).requires_grad_(tensor.requires_grad());
  };
  const auto chosen = at::_fused_sdp_choice(
      like(query), like(key), like(value), on_cpu(mask), dropout, causal, scale, grouped);
  const auto math = static_cast<int64_t>(sdp::SDPBackend::math);
  return chosen == math ? math : static_cast<int64_t>(sdp::SDPBackend::overrideable);
}

std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
    at::Tensor, at::Tensor>
attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    bool,
    std::optional<double> scale) {
  auto [output, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      on_cpu(query), on_cpu(key), on_cpu(value), dropout, causal, on_cpu(mask), scale);
  const auto none = at::empty({0}, query.options().dtype(at::kLong));
  return {
      there(output), there(sums), none, none, query.sym_size(2), key.sym_size(2), none, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& gradient,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& mask,
    std::array<bool, 4>,
    const at::Tensor& output,
    const at::Tensor& sums,
    const at::Tensor&,
    const at::Tensor&,
    c10::SymInt,
    c10::SymInt,
    double dropout,
    bool causal,
    const at::Tensor&,
    const at::Tensor&,
    std::optional<double> scale) {
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_cpu(gradient), on_cpu(query), on_cpu(key), on_cpu(value), on_cpu(output), on_cpu(sums),
      dropout, causal, on_cpu(std::optional(mask)), scale);
  return {there(of_query), there(of_key), there(of_value), at::Tensor()};
}

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  return there(at::convolution_symint(
      on_cpu(input), on_cpu(weight), on_cpu(bias), stride, padding, dilation, transposed,
      output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> wanted) {
  const std::vector<c10::SymInt> outputs = {weight.sym_size(0)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      on_cpu(gradient), on_cpu(input), on_cpu(weight), c10::SymIntArrayRef(outputs), stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  return {there(of_input), there(of_weight), there(of_bias)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_and_resize);
  library.impl("_local_scalar_dense", number);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("view", at::native::view);
  library.impl("unfold", at::native::unfold);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  // For devices without kernels of their own PyTorch makes these of other operations, which round
  // otherwise.
  for (const auto* name : {"silu_backward", "mish_backward", "native_layer_norm", "native_group_norm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_kind)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(KIND, &memory);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("lack_float64", []() { has_float64 = false; });
  module.def("limit_memory", [](int64_t bytes) { most_bytes = bytes; });
  module.def("used_bytes", []() { return used_bytes.load(); });
  module.def("peak_bytes", []() { return peak_bytes.load(); });
  module.def("times_emptied", []() { return emptied.load(); });
  module.def("operations", []() { return operations.load(); });
}
