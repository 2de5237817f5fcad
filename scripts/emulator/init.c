/* Process 1 of the emulated machine: runs one program, tells its exit status, powers off.
 *
 * /arguments    the program's path and arguments, each ended by a NUL
 * /environment  its environment, likewise
 * /modules      kernel modules, with their order in /modules/order; when present, the program runs
 *               in the ext4 file system of the first disk
 *
 * The program's output goes to the second serial line; the first is the kernel's console, where the
 * line "EMULATOR_EXIT n" tells the status. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static void power_off(void) {
  fflush(stdout);
  tcdrain(STDOUT_FILENO);
  sync();
  reboot(RB_POWER_OFF);
  for (;;) pause();
}

/* run.sh finds no status then, and prints the console. */
static void fail(const char* what) {
  perror(what);
  power_off();
}

static char* read_file(const char* path, size_t* size) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(path);
  struct stat status;
  if (fstat(file, &status) != 0) fail(path);
  *size = (size_t)status.st_size;
  char* text = calloc(*size + 1, 1);
  if (text == NULL || read(file, text, *size) != (ssize_t)*size) fail(path);
  close(file);
  return text;
}

/* The NUL-ended strings of a file, as execve wants them. */
static char** read_strings(const char* path) {
  size_t size;
  char* text = read_file(path, &size);
  char** strings = calloc(size + 1, sizeof(char*));
  if (strings == NULL) fail(path);
  int count = 0;
  for (size_t i = 0; i < size; i += strlen(text + i) + 1) strings[count++] = text + i;
  return strings;
}

static void load_modules(void) {
  size_t size;
  char* order = read_file("/modules/order", &size);
  for (char* name = strtok(order, "\n"); name != NULL; name = strtok(NULL, "\n")) {
    char path[256];
    snprintf(path, sizeof path, "/modules/%s", name);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || syscall(SYS_finit_module, file, "", 0) != 0) fail(path);
    close(file);
  }
}

static void mount_or_fail(const char* source, const char* target, const char* type,
                          unsigned long flags) {
  mkdir(target, 0755);
  if (mount(source, target, type, flags, NULL) != 0) fail(target);
}

static void mount_disk(void) {
  struct stat status;
  for (int tries = 0; tries < 100 && stat("/dev/sda", &status) != 0; ++tries) usleep(50000);
  mount_or_fail("/dev/sda", "/disk", "ext4", MS_NOATIME);
  mount_or_fail("/proc", "/disk/proc", NULL, MS_BIND);
  mount_or_fail("/sys", "/disk/sys", NULL, MS_BIND);
  mount_or_fail("/dev", "/disk/dev", NULL, MS_BIND);
  mount_or_fail("/tmp", "/disk/tmp", NULL, MS_BIND);
}

static void run_program(int on_disk) {
  char** arguments = read_strings("/arguments");
  char** environment = read_strings("/environment");
  const int line = open("/dev/ttyS1", O_RDWR | O_NOCTTY);
  const int empty = open("/dev/null", O_RDONLY);
  struct termios mode;
  if (line < 0 || empty < 0 || tcgetattr(line, &mode) != 0) fail("/dev/ttyS1");
  cfmakeraw(&mode);
  cfsetspeed(&mode, B115200);
  mode.c_cflag |= CLOCAL;
  tcsetattr(line, TCSANOW, &mode);
  dup2(empty, STDIN_FILENO);
  dup2(line, STDOUT_FILENO);
  dup2(line, STDERR_FILENO);
  if (on_disk && (chroot("/disk") != 0 || chdir("/") != 0)) _exit(126);
  execve(arguments[0], arguments, environment);
  perror(arguments[0]);
  _exit(127);
}

int main(void) {
  mount_or_fail("proc", "/proc", "proc", 0);
  mount_or_fail("sys", "/sys", "sysfs", 0);
  mount_or_fail("dev", "/dev", "devtmpfs", 0);
  mount_or_fail("tmp", "/tmp", "tmpfs", 0);
  struct stat status;
  const int on_disk = stat("/modules", &status) == 0;
  if (on_disk) {
    load_modules();
    mount_disk();
  }

  const pid_t program = fork();
  if (program < 0) fail("fork");
  if (program == 0) run_program(on_disk);
  int ended = 0;
  /* Orphans of the program become ours. */
  while (waitpid(-1, &ended, 0) != program) continue;

  const int line = open("/dev/ttyS1", O_RDWR | O_NOCTTY);
  if (line >= 0) tcdrain(line);
  printf("\nEMULATOR_EXIT %d\n", WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended));
  power_off();
}
