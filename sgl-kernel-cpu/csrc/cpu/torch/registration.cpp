#include "torch/registration.h"

#include <cstdlib>
#include <new>

namespace sgl_kernel {
namespace {

// Names of numbers that come as such because the Torch that this was built for does not have them.
// They are those of c10::ScalarType, which do not change.
std::string dtype_of_number(long number) {
  switch (number) {
    case 12:
      return "qint8";
    case 13:
      return "quint8";
    case 14:
      return "qint32";
    case 44:
      return "float8_e8m0fnu";
    case 45:
      return "float4_e2m1fn_x2";
    default:
      return "dtype number " + std::to_string(number) + " of Torch";
  }
}

}  // namespace

void rethrow_from(const char* op) {
  const std::string prefix = std::string("sgl_kernel::") + op + ": ";
  try {
    throw;
  } catch (const OutOfMemory& error) {
    throw std::runtime_error(prefix + error.what());
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(prefix + "out of memory");
  } catch (const std::exception& error) {
    static const std::string kUnknown = "Not yet supported ScalarType ";
    const std::string what = error.what();
    const size_t at = what.find(kUnknown);
    if (at == std::string::npos) throw;
    const long number = std::strtol(what.c_str() + at + kUnknown.size(), nullptr, 10);
    throw std::runtime_error(prefix + "expected dtypes that an op takes, got " +
                             dtype_of_number(number));
  }
}

}  // namespace sgl_kernel
