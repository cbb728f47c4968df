// Includes the unmodified source FOLDER/KERNEL.cu, in a namespace per kernel.
#include "cuda.h"

#define TEXT(x) #x
#define FILE_OF(folder, name) TEXT(folder / name.cu)
namespace KERNEL {
#include FILE_OF(FOLDER, KERNEL)
}
