//! etcd's authentication: users, roles, permissions and tokens.

use crate::etcd::Etcd;
use crate::grpc::{Client, Status};
use crate::pb::{
    AuthRoleAddRequest, AuthRoleGrantPermissionRequest, AuthRoleRevokePermissionRequest, AuthUserAddRequest,
    AuthUserGrantRoleRequest, AuthUserRevokeRoleRequest, AuthenticateRequest, AuthenticateResponse, Empty,
    Permission, prefix_end,
};

/// rangecache's own user in [`create_users`].
pub const MIRROR: &str = "mirror";

impl Client {
    async fn auth(&self, method: &str, request: &impl prost::Message) -> Result<(), Status> {
        let path = format!("/etcdserverpb.Auth/{method}");
        self.unary::<Empty>(&path, request).await.map(|_| ())
    }

    /// Adds a user.
    pub async fn add_user(&self, name: &str, password: &str) -> Result<(), Status> {
        let (name, password) = (name.to_owned(), password.to_owned());
        self.auth("UserAdd", &AuthUserAddRequest { name, password }).await
    }

    /// Deletes a user, whose tokens become invalid.
    pub async fn delete_user(&self, name: &str) -> Result<(), Status> {
        let (name, password) = (name.to_owned(), String::new());
        // Both messages have the name.
        let request = AuthUserAddRequest { name, password };
        self.auth("UserDelete", &request).await
    }

    /// Changes a user's password, which invalidates the user's tokens.
    pub async fn change_password(&self, name: &str, password: &str) -> Result<(), Status> {
        let (name, password) = (name.to_owned(), password.to_owned());
        // Both messages have these fields.
        let request = AuthUserAddRequest { name, password };
        self.auth("UserChangePassword", &request).await
    }

    /// Adds a role without permissions.
    pub async fn add_role(&self, role: &str) -> Result<(), Status> {
        let name = role.to_owned();
        self.auth("RoleAdd", &AuthRoleAddRequest { name }).await
    }

    /// Grants `user` a role.
    pub async fn grant_role(&self, user: &str, role: &str) -> Result<(), Status> {
        let (user, role) = (user.to_owned(), role.to_owned());
        let request = AuthUserGrantRoleRequest { user, role };
        self.auth("UserGrantRole", &request).await
    }

    /// Revokes a role from `user`.
    pub async fn revoke_role(&self, user: &str, role: &str) -> Result<(), Status> {
        let (name, role) = (user.to_owned(), role.to_owned());
        let request = AuthUserRevokeRoleRequest { name, role };
        self.auth("UserRevokeRole", &request).await
    }

    /// Grants `role` reads of `[key, range_end)`.
    pub async fn grant_read(
        &self,
        role: &str,
        key: impl AsRef<[u8]>,
        range_end: impl AsRef<[u8]>,
    ) -> Result<(), Status> {
        let permission = Permission {
            perm_type: 0,
            key: key.as_ref().to_vec(),
            range_end: range_end.as_ref().to_vec(),
        };
        let request = AuthRoleGrantPermissionRequest {
            name: role.to_owned(),
            perm: Some(permission),
        };
        self.auth("RoleGrantPermission", &request).await
    }

    /// Revokes from `role` the permission on exactly `[key, range_end)`.
    pub async fn revoke_read(
        &self,
        role: &str,
        key: impl AsRef<[u8]>,
        range_end: impl AsRef<[u8]>,
    ) -> Result<(), Status> {
        let request = AuthRoleRevokePermissionRequest {
            role: role.to_owned(),
            key: key.as_ref().to_vec(),
            range_end: range_end.as_ref().to_vec(),
        };
        self.auth("RoleRevokePermission", &request).await
    }

    /// Enables authentication; the user root must exist and have its role.
    pub async fn auth_enable(&self) -> Result<(), Status> {
        self.auth("AuthEnable", &Empty {}).await
    }

    /// Creates the user and the role root, enables authentication, and returns a client that is root.
    pub async fn enable_auth(&self, password: &str) -> Result<Self, Status> {
        self.add_user("root", password).await?;
        self.add_role("root").await?;
        self.grant_role("root", "root").await?;
        self.auth_enable().await?;
        self.authenticate("root", password).await
    }

    /// Disables authentication.
    pub async fn disable_auth(&self) -> Result<(), Status> {
        self.auth("AuthDisable", &Empty {}).await
    }

    /// Returns a client on the same connection with a new token of the user `name` on every call.
    pub async fn authenticate(&self, name: &str, password: &str) -> Result<Self, Status> {
        let token = self.new_token(name, password).await?;
        Ok(self.with_metadata("token", &token))
    }

    /// A new token of that user.
    pub async fn new_token(&self, name: &str, password: &str) -> Result<String, Status> {
        let (name, password) = (name.to_owned(), password.to_owned());
        let request = AuthenticateRequest { name, password };
        let response: AuthenticateResponse = self.unary("/etcdserverpb.Auth/Authenticate", &request).await?;
        Ok(response.token)
    }
}

/// A token of one of the users of [`create_users`].
pub async fn token(direct: &Client, name: &str) -> String {
    direct.new_token(name, &password(name)).await.unwrap()
}

/// Password of a user of [`create_users`].
pub fn password(name: &str) -> String {
    format!("open-sesame-{name}")
}

/// Creates users and roles, enables authentication, and returns a client that is root: [`MIRROR`] may read all keys,
/// alice `/a/`, bob `/b/` and one key under `/a/`, carol nothing.
pub async fn create_users(etcd: &Etcd) -> Client {
    let client = etcd.client().await;
    for (name, role) in [(MIRROR, "all"), ("alice", "a"), ("bob", "b"), ("carol", "")] {
        client.add_user(name, &password(name)).await.unwrap();
        if !role.is_empty() {
            client.add_role(role).await.unwrap();
            client.grant_role(name, role).await.unwrap();
        }
    }
    client.grant_read("all", "\0", "\0").await.unwrap();
    client.grant_read("a", "/a/", prefix_end(b"/a/")).await.unwrap();
    client.grant_read("b", "/b/", prefix_end(b"/b/")).await.unwrap();
    client.grant_read("b", "/a/007", "").await.unwrap();
    client.enable_auth(&password("root")).await.unwrap()
}
