#include "calibrate/pickle.h"

#include <crumb/error.h>

#include <bit>
#include <cstring>
#include <map>
#include <string_view>

namespace crumb::pickle {

namespace {

constexpr size_t kMostBytes = size_t(1) << 20;  // a value costs at most some 200 bytes for each byte
constexpr size_t kMostDimensions = 8;
constexpr size_t kMostKeyBytes = 64;

// Opcodes by their names in Python's pickletools.
enum Op : uint8_t {
    PROTO = 0x80,
    FRAME = 0x95,
    STOP = '.',
    MARK = '(',
    NONE = 'N',
    NEWTRUE = 0x88,
    NEWFALSE = 0x89,
    BININT = 'J',
    BININT1 = 'K',
    BININT2 = 'M',
    LONG1 = 0x8a,
    BINFLOAT = 'G',
    BINUNICODE = 'X',
    SHORT_BINUNICODE = 0x8c,
    EMPTY_TUPLE = ')',
    TUPLE = 't',
    TUPLE1 = 0x85,
    TUPLE2 = 0x86,
    TUPLE3 = 0x87,
    EMPTY_LIST = ']',
    APPEND = 'a',
    APPENDS = 'e',
    EMPTY_DICT = '}',
    SETITEM = 's',
    SETITEMS = 'u',
    BINPUT = 'q',
    LONG_BINPUT = 'r',
    MEMOIZE = 0x94,
    BINGET = 'h',
    LONG_BINGET = 'j',
    GLOBAL = 'c',
    STACK_GLOBAL = 0x93,
    BINPERSID = 'Q',
    REDUCE = 'R',
};

constexpr std::string_view kRebuildTensor = "torch._utils _rebuild_tensor_v2";
constexpr std::string_view kOrderedDict = "collections OrderedDict";
constexpr std::string_view kStoragePrefix = "torch ";
constexpr std::string_view kStorages[] = {"FloatStorage", "DoubleStorage", "HalfStorage", "BFloat16Storage"};

bool known(std::string_view global) {
    if (global == kRebuildTensor || global == kOrderedDict) {
        return true;
    }
    for (const auto storage : kStorages) {
        if (global.starts_with(kStoragePrefix) && global.substr(kStoragePrefix.size()) == storage) {
            return true;
        }
    }
    return false;
}

}  // namespace

const char* kind(Ref value) {
    constexpr const char* names[] = {"nothing", "a mark", "a truth value", "a number",     "a fraction", "a text",
                                     "a class", "a list", "a tuple",       "a dictionary", "a storage",  "a tensor"};
    static_assert(std::size(names) == std::variant_size_v<decltype(Value::data)>);
    return names[value->data.index()];
}

class Machine {
  public:
    Machine(std::span<const std::byte> bytes, const std::string& name, std::deque<Value>& values)
        : rest_(bytes), size_(bytes.size()), name_(name), values_(values) {}

    Ref run() {
        while (true) {
            const auto op = Op(number<uint8_t>());
            if (op == STOP) {
                break;
            }
            step(op);
        }
        Ref result = pop();
        if (!stack_.empty()) {
            refuse("values are left over at its end");
        }
        return result;
    }

  private:
    template <class... Args>
    [[noreturn]] void refuse(fmt::format_string<Args...> what, Args&&... args) const {
        fail("{}: byte {} of its pickle: {}; only files with plain tensors can be read", name_, size_ - rest_.size(),
             fmt::format(what, std::forward<Args>(args)...));
    }

    std::span<const std::byte> take(uint64_t n) {
        if (n > rest_.size()) {
            refuse("it ends where {} more bytes should follow", n);
        }
        const auto piece = rest_.first(n);
        rest_ = rest_.subspan(n);
        return piece;
    }
    template <class T>
    T number() {
        T value;
        std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
        return value;
    }
    std::string text(uint64_t n) {
        const auto piece = take(n);
        return {reinterpret_cast<const char*>(piece.data()), piece.size()};
    }
    std::string line() {
        std::string result;
        for (char c = char(number<uint8_t>()); c != '\n'; c = char(number<uint8_t>())) {
            result += c;
        }
        return result;
    }

    template <class T>
    void push(T data) {
        stack_.push_back(&values_.emplace_back(Value{std::move(data)}));
    }
    Value* pop() {
        if (stack_.empty()) {
            refuse("it takes a value where there is none");
        }
        Value* top = stack_.back();
        stack_.pop_back();
        return top;
    }
    template <class T>
    T& as(Value* value, const char* expected) const {
        T* data = std::get_if<T>(&value->data);
        if (!data) {
            refuse("{} where {} is expected", kind(value), expected);
        }
        return *data;
    }
    template <class T>
    T& top(const char* expected) const {
        if (stack_.empty()) {
            refuse("it takes a value where there is none");
        }
        return as<T>(stack_.back(), expected);
    }

    std::vector<Ref> to_mark() {
        size_t at = stack_.size();
        while (at > 0 && !std::holds_alternative<Mark>(stack_[at - 1]->data)) {
            --at;
        }
        if (at == 0) {
            refuse("a mark is missing");
        }
        std::vector<Ref> items(stack_.begin() + std::ptrdiff_t(at), stack_.end());
        stack_.resize(at - 1);
        return items;
    }
    void tuple(size_t n) {
        std::vector<Ref> items(n);
        for (size_t i = n; i-- > 0;) {
            items[i] = pop();
        }
        push(Tuple{std::move(items)});
    }

    void remember(uint64_t index) {
        if (stack_.empty()) {
            refuse("it remembers a value where there is none");
        }
        memo_[index] = stack_.back();
    }
    void recall(uint64_t index) {
        const auto found = memo_.find(index);
        if (found == memo_.end()) {
            refuse("it recalls value {}, which it never stored", index);
        }
        stack_.push_back(found->second);
    }

    void global(const std::string& module, const std::string& name) {
        const std::string full = module + " " + name;
        if (!known(full)) {
            refuse("it asks for {}.{}, which is not a plain tensor's", module, name);
        }
        push(Global{full});
    }

    int64_t long_integer() {
        const auto bytes = take(number<uint8_t>());
        if (bytes.size() > 8) {
            refuse("a number of {} bytes", bytes.size());
        }
        if (bytes.empty()) {
            return 0;
        }
        const bool negative = uint8_t(bytes.back()) & 0x80;
        uint64_t value = negative ? ~uint64_t(0) : 0;
        std::memcpy(&value, bytes.data(), bytes.size());
        return int64_t(value);
    }

    // ('storage', torch.FloatStorage, key, device, elements)
    void persistent_id() {
        const auto& id = as<Tuple>(pop(), "a storage's description").items;
        if (id.size() != 5 || as_text(id[0]) != "storage") {
            refuse("it refers to something other than a storage");
        }
        const auto* type = std::get_if<Global>(&id[1]->data);
        const auto* elements = std::get_if<int64_t>(&id[4]->data);
        if (!type || !type->name.starts_with(kStoragePrefix) || type->name == kRebuildTensor || !elements ||
            *elements < 0) {
            refuse("a storage that is not one of floating-point numbers");
        }
        const std::string& key = as_text(id[2]);
        if (key.size() > kMostKeyBytes) {
            refuse("a storage whose name has {} bytes", key.size());
        }
        push(Storage{type->name.substr(kStoragePrefix.size()), key, *elements});
    }
    const std::string& as_text(Ref value) const {
        const auto* text = std::get_if<std::string>(&value->data);
        if (!text) {
            refuse("{} where a text is expected", kind(value));
        }
        return *text;
    }

    std::vector<int64_t> sizes(Ref value) const {
        const auto* tuple = std::get_if<Tuple>(&value->data);
        if (!tuple || tuple->items.size() > kMostDimensions) {
            refuse("a tensor without a shape");
        }
        std::vector<int64_t> result;
        for (const Ref item : tuple->items) {
            const auto* n = std::get_if<int64_t>(&item->data);
            if (!n || *n < 0) {
                refuse("a tensor with a size or stride that is {}", n ? "negative" : kind(item));
            }
            result.push_back(*n);
        }
        return result;
    }

    void reduce() {
        const auto& arguments = as<Tuple>(pop(), "a tuple of arguments").items;
        const auto function = as<Global>(pop(), "a constructor").name;
        if (function == kOrderedDict && arguments.empty()) {
            return push(Dict{});
        }
        // storage, offset, size, stride, requires_grad, backward_hooks, metadata
        if (function != kRebuildTensor || arguments.size() < 6) {
            refuse("it calls {} with {} arguments", function, arguments.size());
        }
        const auto* storage = std::get_if<Storage>(&arguments[0]->data);
        const auto* offset = std::get_if<int64_t>(&arguments[1]->data);
        if (!storage || !offset || *offset < 0) {
            refuse("a tensor without a storage");
        }
        Tensor tensor{*storage, *offset, sizes(arguments[2]), sizes(arguments[3])};
        if (tensor.shape.size() != tensor.stride.size()) {
            refuse("a tensor with fewer strides than sizes");
        }
        push(std::move(tensor));
    }

    void set_items(Dict& dict, const std::vector<Ref>& items) {
        if (items.size() % 2) {
            refuse("a dictionary with a key that has no value");
        }
        for (size_t i = 0; i < items.size(); i += 2) {
            dict.items.emplace_back(items[i], items[i + 1]);
        }
    }

    void step(Op op) {
        switch (op) {
            case PROTO:
                if (const int version = number<uint8_t>(); version < 2 || version > 5) {
                    refuse("protocol {}", version);
                }
                return;
            case FRAME:
                number<uint64_t>();
                return;
            case MARK:
                return push(Mark{});
            case NONE:
                return push(None{});
            case NEWTRUE:
                return push(true);
            case NEWFALSE:
                return push(false);
            case BININT:
                return push(int64_t(number<int32_t>()));
            case BININT1:
                return push(int64_t(number<uint8_t>()));
            case BININT2:
                return push(int64_t(number<uint16_t>()));
            case LONG1:
                return push(long_integer());
            case BINFLOAT:
                return push(std::bit_cast<double>(__builtin_bswap64(number<uint64_t>())));
            case BINUNICODE:
                return push(text(number<uint32_t>()));
            case SHORT_BINUNICODE:
                return push(text(number<uint8_t>()));
            case EMPTY_TUPLE:
                return push(Tuple{});
            case TUPLE:
                return push(Tuple{to_mark()});
            case TUPLE1:
                return tuple(1);
            case TUPLE2:
                return tuple(2);
            case TUPLE3:
                return tuple(3);
            case EMPTY_LIST:
                return push(List{});
            case APPEND: {
                const Ref item = pop();
                top<List>("a list").items.push_back(item);
                return;
            }
            case APPENDS: {
                const auto items = to_mark();
                auto& list = top<List>("a list").items;
                list.insert(list.end(), items.begin(), items.end());
                return;
            }
            case EMPTY_DICT:
                return push(Dict{});
            case SETITEM: {
                const Ref value = pop(), key = pop();
                return set_items(top<Dict>("a dictionary"), {key, value});
            }
            case SETITEMS: {
                const auto items = to_mark();
                return set_items(top<Dict>("a dictionary"), items);
            }
            case BINPUT:
                return remember(number<uint8_t>());
            case LONG_BINPUT:
                return remember(number<uint32_t>());
            case MEMOIZE:
                return remember(memo_.size());
            case BINGET:
                return recall(number<uint8_t>());
            case LONG_BINGET:
                return recall(number<uint32_t>());
            case GLOBAL: {
                const std::string module = line();
                return global(module, line());
            }
            case STACK_GLOBAL: {
                const std::string name = as<std::string>(pop(), "a name");
                return global(as<std::string>(pop(), "a module"), name);
            }
            case BINPERSID:
                return persistent_id();
            case REDUCE:
                return reduce();
            case STOP:
                break;
        }
        refuse("opcode 0x{:02x}", int(op));
    }

    std::span<const std::byte> rest_;
    const size_t size_;
    const std::string& name_;
    std::deque<Value>& values_;
    std::vector<Value*> stack_;
    std::map<uint64_t, Value*> memo_;
};

Document::Document(std::span<const std::byte> bytes, const std::string& name) {
    if (bytes.size() > kMostBytes) {
        fail("{}: its pickle has {} bytes, more than {}", name, bytes.size(), kMostBytes);
    }
    root_ = Machine(bytes, name, values_).run();
}

}  // namespace crumb::pickle
