#include "launch_cache.h"

#include "../python/python_function.h"
#include "../python/python_module.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

namespace transformer_fast {
namespace {

namespace py = pybind11;
using at::Tensor;

constexpr size_t kStream = 3;          // the stream among the arguments of a launch
constexpr size_t kMostOfATensor = 32;  // calls kept on one source: a buffer may come as ever other slices
constexpr int64_t kAlignment = 64;     // of temporaries, in bytes

// An attribute name, interned for fast lookups.
class Attribute {
 public:
  explicit Attribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  py::object of(py::handle object) const {
    PyObject* const value = PyObject_GetAttr(object.ptr(), name_);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }
  py::object of(py::handle object, py::object absent) const {
    return py::getattr(object, py::handle(name_), std::move(absent));
  }

 private:
  PyObject* name_;
};

bool is_true(py::handle object) {
  const int result = PyObject_IsTrue(object.ptr());
  if (result < 0) throw py::error_already_set();
  return result != 0;
}

// True if a hook, or a chain of hooks, would call anything; a chain always exists and is mostly empty.
bool is_active(const py::object& hook) {
  static const Attribute calls("calls");
  return !hook.is_none() && is_true(calls.of(hook, py::bool_(true)));
}

// The tensor that owns the memory.
Tensor base_of(const Tensor& tensor) { return tensor.is_view() ? Tensor(tensor._base()) : tensor; }

bool is_unchanged(const CachedCall::Source& source, const Tensor& tensor) {
  const Tensor base = base_of(tensor);
  return source.base._unsafe_get_target() == base.unsafeGetTensorImpl() && source.version == base._version();
}

CachedCall::Output layout_of(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  int64_t elements = tensor.numel() == 0 ? 0 : 1;
  for (int64_t dim = 0; elements > 0 && dim < tensor.dim(); ++dim)
    elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  const int64_t bytes = elements * static_cast<int64_t>(tensor.element_size());
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), bytes};
}

int64_t rounded_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

void LaunchCall::scalar(const char* text) {
  add('s', std::strlen(text));
  key_.append(text);
}

void LaunchCall::input(const Tensor& tensor) {
  if (!tensor.defined()) {
    add('n', int64_t{0});
    add_address(nullptr);
    return;
  }
  if (values_.empty()) device_ = tensor.device();
  add('t', static_cast<int64_t>(tensor.scalar_type()) << 32 | tensor.dim());
  for (const at::IntArrayRef numbers : {tensor.sizes(), tensor.strides()})
    key_.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));
  const int64_t address = add_address(tensor.const_data_ptr());
  key_.push_back(static_cast<char>(std::find(values_.begin(), values_.end(), address) - values_.begin()));
}

void LaunchCall::input(int64_t seed) {
  add('a', int64_t{0});
  seed_ = values_.size();
  values_.push_back(seed);
}

void LaunchCall::output(const OptionalTensor& tensor) {
  outputs_.push_back(tensor.value_or(Tensor()));
  add_address(tensor ? tensor->const_data_ptr() : nullptr);
}

int64_t LaunchCall::add_address(const void* memory) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory));
  address_bits_ |= address;
  values_.push_back(address);
  return address;
}

py::dict LaunchCall::places() const {
  py::dict found;
  for (size_t place = 0; place < values_.size(); ++place) {
    const py::object key = place == seed_ ? py::object(py::str("seed")) : py::int_(values_[place]);
    if (place == seed_ || values_[place] != 0) PyDict_SetDefault(found.ptr(), key.ptr(), py::int_(place).ptr());
  }
  return found;
}

LaunchCache& LaunchCache::instance() {
  static auto* const cache = new LaunchCache;
  return *cache;
}

void LaunchCache::connect(py::object driver, py::object runtime, py::object table) {
  driver_ = std::move(driver), runtime_ = std::move(runtime), table_ = std::move(table);
}

bool LaunchCache::can_replay() const {
  static const Attribute debug("debug"), enter("launch_enter_hook"), leave("launch_exit_hook");
  static const Attribute inspection("add_stages_inspection_hook");
  return enabled && !is_true(debug.of(runtime_)) && !is_active(enter.of(runtime_)) && !is_active(leave.of(runtime_)) &&
         inspection.of(runtime_, py::none()).is_none();
}

int64_t LaunchCache::table_changes() const {
  static const Attribute changes("changes");
  return py::cast<int64_t>(changes.of(table_));
}

// Place where calls like this one are kept; nullptr where nothing may be, or nothing is yet. What is derived from a
// tensor lives as long as it does, so a call with sources is kept on the first of them: not during the capture of a
// CUDA graph, whose memory is its own, nor for inference tensors, which count no writes.
CachedCalls* LaunchCache::calls_like(const LaunchCall& call, bool make) {
  static const PythonFunction is_capturing("torch.cuda", "is_current_stream_capturing");
  static const PythonFunction results_of("transformer_fast.tensor_cache", "results_of");
  static const Attribute tensor_cache("_tensor_cache");
  if (call.sources_.empty()) return &calls_;
  const auto is_inference = [](const Tensor& source) { return source.is_inference(); };
  if (std::any_of(call.sources_.begin(), call.sources_.end(), is_inference)) return nullptr;
  if (call.device_.is_cuda() && is_true(is_capturing.call({}))) return nullptr;
  const py::object base = wrap(base_of(call.sources_[0]));
  const py::object results = make ? results_of.call({}, base) : tensor_cache.of(base, py::none());
  if (results.is_none()) return nullptr;
  static PyObject* const key = PyUnicode_InternFromString("launches");
  py::handle calls = PyDict_GetItemWithError(results.ptr(), key);
  if (!calls && make) {
    const py::object made = py::cast(CachedCalls());
    PyDict_SetItem(results.ptr(), key, made.ptr());
    calls = made;
  }
  return calls ? calls.cast<CachedCalls*>() : nullptr;
}

LaunchCache::Place LaunchCache::current_place() const {
  static const Attribute active("active"), get_device("get_current_device"), get_stream("get_current_stream");
  const py::object driver = active.of(driver_), device = get_device.of(driver)();
  return {py::cast<int64_t>(device), get_stream.of(driver)(device)};
}

std::string LaunchCache::key_of(const LaunchCall& call, const Place& place) {
  std::string key = call.key_;
  const auto add = [&](int64_t number) { key.append(reinterpret_cast<const char*>(&number), sizeof(number)); };
  add(place.device);
  if (call.sources_.empty()) return key;
  add(py::cast<int64_t>(place.stream));
  for (const Tensor& source : call.sources_) add(source.storage_offset());
  return key;
}

std::pair<std::shared_ptr<const CachedCall>, LaunchCache::Place> LaunchCache::lookup(const LaunchCall& call) {
  static const Attribute pre_run_hooks("pre_run_hooks");
  if (call.address_bits_ % 16 != 0 || !can_replay()) return {};
  const CachedCalls* const calls = calls_like(call, /*make=*/false);
  if (calls == nullptr || calls->table_changes != table_changes()) return {};
  Place place = current_place();
  const auto found = calls->by_key.find(key_of(call, place));
  if (found == calls->by_key.end()) return {};
  const CachedCall& cached = *found->second;
  if (!std::equal(cached.sources.begin(), cached.sources.end(), call.sources_.begin(), is_unchanged)) return {};
  for (const CachedLaunch& launch : cached.launches)
    if (is_true(pre_run_hooks.of(launch.kernel))) return {};
  return {found->second, std::move(place)};
}

void LaunchCache::start(const CachedCall& cached, const LaunchCall& call, const Place& place) {
  std::vector<PyObject*> arguments;
  std::vector<py::int_> numbers;
  for (const CachedLaunch& launch : cached.launches) {
    PyObject** const first = reinterpret_cast<PyTupleObject*>(launch.arguments.ptr())->ob_item;
    arguments.assign(first, first + launch.arguments.size());
    arguments[kStream] = place.stream.ptr();
    numbers.clear();
    numbers.reserve(launch.places.size());
    for (const auto& [argument, from] : launch.places)
      arguments[argument] = numbers.emplace_back(call.values_[from]).ptr();
    PyObject* const result = PyObject_Vectorcall(launch.run.ptr(), arguments.data(), arguments.size(), nullptr);
    if (result == nullptr) throw py::error_already_set();
    Py_DECREF(result);
  }
}

bool LaunchCache::replay_into(LaunchCall& call, const std::vector<OptionalTensor>& outputs) {
  for (const OptionalTensor& output : outputs) call.output(output);
  const c10::DeviceGuard guard(call.device_);
  const auto [cached, place] = lookup(call);
  if (cached != nullptr) start(*cached, call, place);
  return cached != nullptr;
}

std::vector<Tensor> LaunchCache::replay(LaunchCall& call, size_t results) {
  const c10::DeviceGuard guard(call.device_);
  const auto [cached, place] = lookup(call);
  if (cached == nullptr) return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < results; ++i) {
    const auto& [sizes, strides, dtype, bytes] = cached->outputs[i];
    if (bytes == 0) {
      outputs.emplace_back();
      call.add_address(nullptr);
      continue;
    }
    outputs.push_back(at::empty_strided(sizes, strides, at::TensorOptions(call.device_).dtype(dtype)));
    call.add_address(outputs.back().const_data_ptr());
  }
  // The rest are temporaries, which share one buffer.
  int64_t bytes = 0;
  for (size_t i = results; i < cached->outputs.size(); ++i) bytes += rounded_up(cached->outputs[i].bytes);
  const Tensor buffer = bytes > 0 ? at::empty({bytes}, at::TensorOptions(call.device_).dtype(at::kByte)) : Tensor();
  const auto* next = bytes > 0 ? static_cast<const std::byte*>(buffer.const_data_ptr()) : nullptr;
  for (size_t i = results; i < cached->outputs.size(); ++i) {
    call.add_address(cached->outputs[i].bytes > 0 ? next : nullptr);
    next += rounded_up(cached->outputs[i].bytes);
  }
  start(*cached, call, place);
  return outputs;
}

void LaunchCache::store(const LaunchCall& call, std::vector<CachedLaunch> launches) {
  CachedCalls* const calls = call.address_bits_ % 16 == 0 ? calls_like(call, /*make=*/true) : nullptr;
  if (calls == nullptr) return;
  const size_t most = call.sources_.empty() ? most_calls : kMostOfATensor;
  const int64_t changes = table_changes();
  if (calls->table_changes != changes || calls->by_key.size() >= most) calls->by_key.clear();
  calls->table_changes = changes;
  auto cached = std::make_shared<CachedCall>();
  cached->launches = std::move(launches);
  for (const Tensor& output : call.outputs_) cached->outputs.push_back(layout_of(output));
  for (const Tensor& source : call.sources_) {
    const Tensor base = base_of(source);
    cached->sources.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(base.getIntrusivePtr()), base._version()});
  }
  calls->by_key.insert_or_assign(key_of(call, current_place()), std::move(cached));
}

PYTHON_MODULE_FRAGMENT(m) {
  py::class_<CachedLaunch>(m, "CachedLaunch")
      .def(py::init<py::object, py::tuple, std::vector<std::pair<size_t, size_t>>, py::object, py::object>());
  py::class_<CachedCalls>(m, "CachedCalls");
  py::class_<LaunchCall>(m, "LaunchCall")
      .def(py::init(
               [](const char* scalars, const std::vector<OptionalTensor>& inputs, const std::vector<Tensor>& sources) {
                 LaunchCall call;
                 call.scalar(scalars);
                 for (const OptionalTensor& input : inputs) call.input(input);
                 for (const Tensor& source : sources) call.source(source);
                 return call;
               }),
           py::arg("scalars"), py::arg("inputs"), py::arg("sources") = py::tuple())
      .def("places", &LaunchCall::places);
  py::class_<LaunchCache, std::unique_ptr<LaunchCache, py::nodelete>>(m, "LaunchCache")
      .def("connect", &LaunchCache::connect)
      .def("can_replay", &LaunchCache::can_replay)
      .def("replay_into", &LaunchCache::replay_into)
      .def("store", &LaunchCache::store)
      .def("clear", &LaunchCache::clear)
      .def("__len__", &LaunchCache::size)
      .def_readwrite("enabled", &LaunchCache::enabled)
      .def_readwrite("long_keys", &LaunchCache::long_keys)
      .def_readwrite("most_calls", &LaunchCache::most_calls);
  m.attr("launch_cache") = py::cast(&LaunchCache::instance(), py::return_value_policy::reference);
}

}  // namespace transformer_fast
